"""Runs a trial of `titanlike sweep` as a SageMaker job. Takes the options of launch.py, and the name and directory of the run.

    python sagemaker/trial.py RECIPE.toml --run.dir=runs/SWEEP --run.name=TRIAL --optimizer.lr=0.01 --instances=4 --role=ARN

Attaches to the run's active job, or submits one, and copies the run's metrics to its directory until the job ends. SIGTERM stops
the job, which saves a checkpoint first. If this process is killed, the job continues.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import launch  # first: it makes `titanlike` importable
from job_status import JobStatus, describe, newest_job, stop
from monitor import EXIT_CODES
from options import build_parser
from service import Clients, TransientError, make_clients
from study import fetch

from titanlike.config import UserError
from titanlike.distributed.command_line import command_line
from titanlike.distributed.environment import fail
from titanlike.run.start import Arguments

INTERVAL = 15.0  # seconds between polls of a job
SIMULATION_INTERVAL = 0.5
PATIENCE = 3600.0  # seconds without an answer of AWS
STOP_PATIENCE = 60.0  # the same after a signal

Answer = TypeVar("Answer")


@command_line()
def main() -> None:
    """Executes the command line."""
    try:
        sys.exit(run(sys.argv[1:]))
    except UserError as error:
        fail(error)


def run(arguments: Sequence[str], interval: float = INTERVAL) -> int:
    """Runs a trial. Returns 0 if it trained all steps, 143 if it was stopped, and 1 if it failed."""
    options, rest = build_parser().parse_known_args(arguments)
    overrides = Arguments([options.recipe, *rest]).overrides
    options.run = overrides.pop("run.name")
    folder = Path(overrides.pop("run.dir"), options.run)
    if options.dry_run:
        return launch.launch(options, overrides)
    ended = threading.Event()
    if options.simulate:

        def copy() -> None:
            while not ended.wait(SIMULATION_INTERVAL):
                fetch(options, folder)

        copier = threading.Thread(target=copy, daemon=True)
        copier.start()
        code = launch.launch(options, overrides)
        ended.set()
        copier.join()
        fetch(options, folder)
        return code
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    clients = make_clients(options.region)

    def pause() -> None:
        if stopping.is_set():
            time.sleep(interval)
        else:
            stopping.wait(interval)

    def answer_of(call: Callable[[], Answer]) -> Answer:
        """Repeats a call until AWS answers. The job continues if this process gives up."""
        start = time.monotonic()
        while True:
            try:
                return call()
            except TransientError as error:
                if time.monotonic() - start > (STOP_PATIENCE if stopping.is_set() else PATIENCE):
                    raise UserError(f"{error}; a job of run {options.run} that has started continues") from None
            pause()

    def newest() -> JobStatus | None:
        return newest_job(clients, options.run, options.prefix)

    def submitted() -> JobStatus:
        if (job := newest()) is None or job.name == before:  # a new job is not listed at once
            raise TransientError(f"the job of run {options.run} has been submitted, but is not listed")
        return job

    job = answer_of(newest)
    if job is None or not (job.is_active or job.status == "Completed"):
        if stopping.is_set():
            return EXIT_CODES["Stopped"]
        before = job.name if job else ""
        launch.launch(options, overrides)
        job = answer_of(submitted)
    elif other := [f"--{key}={value}" for key, value in overrides.items() if f"--{key}={value}" not in job.arguments]:
        raise UserError(
            f"{job.name} is a job of this run with other values than {other[0]}; choose another name of the sweep"
        )
    name = job.name
    while True:
        status = answer_of(lambda: _poll(clients, name, stopping.is_set()))
        answer_of(lambda: fetch(options, folder))
        if not status.is_active:
            if status.reason:
                print(f"error: {status.reason}", file=sys.stderr)
            return EXIT_CODES.get(status.status, 1)
        pause()


def _poll(clients: Clients, name: str, stopping: bool) -> JobStatus:
    """Returns a job's status, and stops the job if that is requested."""
    status = describe(clients, name)
    if status is None:
        raise UserError(f"{name}: no such job in {clients.region}")
    if stopping and status.status == "InProgress":
        print(stop(clients, name))
    return status


if __name__ == "__main__":
    main()
