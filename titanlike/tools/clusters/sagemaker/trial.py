"""Runs a trial of `titanlike sweep` as a SageMaker job. Takes the options of `titanlike launch sagemaker`, the run's name and its
directory.

    python -m titanlike.tools.clusters.sagemaker.trial RECIPE --run.dir=runs/SWEEP --run.name=TRIAL --optimizer.lr=0.01 --nodes=4

Attaches to the run's active job, or submits one, and copies the run's metrics to its directory until the job ends. SIGTERM stops
the job, which saves a checkpoint first. If this process is killed, the job continues.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from titanlike.config import UserError
from titanlike.distributed.command_line import command_line
from titanlike.distributed.environment import fail
from titanlike.run.start import Arguments
from titanlike.tools.arguments import positive_int
from titanlike.tools.clusters.sagemaker.job import EXAMPLE_BUCKET, bucket_of, launch
from titanlike.tools.clusters.sagemaker.jobs import JobStatus, describe, newest_job
from titanlike.tools.clusters.sagemaker.options import add_options
from titanlike.tools.clusters.sagemaker.service import Clients, NotFound, TransientError, make_clients

INTERVAL = 15.0  # seconds between polls of a job
SIMULATION_INTERVAL = 0.5
PATIENCE = 3600.0  # seconds without an answer of AWS
STOP_PATIENCE = 60.0  # the same after a signal

FILES = ("metrics.jsonl", "environment.json")
EXIT_CODES = {"Completed": 0, "Stopped": 128 + signal.SIGTERM}

Answer = TypeVar("Answer")


@command_line()
def main() -> None:
    """Executes the command line."""
    try:
        sys.exit(run(sys.argv[1:]))
    except UserError as error:
        fail(error)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of a trial's options: those of `titanlike launch sagemaker`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--nodes", type=positive_int, default=1)
    parser.add_argument("--hardware", default="")
    parser.add_argument("--dry-run", action="store_true")
    add_options(parser)
    return parser


def fetch(options: argparse.Namespace, folder: Path, clients: Clients | None) -> None:
    """Copies a run's metrics to `folder`, from S3, or without clients from the folder that replaces it."""
    for file in FILES:
        key = f"{options.prefix}/runs/{options.run_name}/{file}"
        try:
            if clients is None:
                content = (options.folder / "s3" / (bucket_of(options) or EXAMPLE_BUCKET) / key).read_bytes()
            else:
                content = clients.read_object(bucket_of(options) or clients.default_bucket(), key)
        except (FileNotFoundError, NotFound):
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)


def run(arguments: Sequence[str], interval: float = INTERVAL) -> int:
    """Runs a trial. Returns 0 if it trained all steps, 143 if it was stopped, and 1 if it failed."""
    options, rest = build_parser().parse_known_args(arguments)
    overrides = Arguments([options.recipe, *rest]).overrides
    run = options.run_name = overrides.pop("run.name")
    recipe, folder = Path(options.recipe), Path(overrides.pop("run.dir"), run)
    if options.dry_run:
        return launch(options, recipe, overrides)
    ended = threading.Event()
    if options.simulate:

        def copy() -> None:
            while not ended.wait(SIMULATION_INTERVAL):
                fetch(options, folder, None)

        copier = threading.Thread(target=copy, daemon=True)
        copier.start()
        code = launch(options, recipe, overrides)
        ended.set()
        copier.join()
        fetch(options, folder, None)
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
                    raise UserError(f"{error}; a job of run {run} that has started continues") from None
            pause()

    def newest() -> JobStatus | None:
        return newest_job(clients, run, options.prefix)

    def submitted() -> JobStatus:
        if (job := newest()) is None or job.name == before:  # a new job is not listed at once
            raise TransientError(f"the job of run {run} has been submitted, but is not listed")
        return job

    job = answer_of(newest)
    if job is None or not (job.is_active or job.status == "Completed"):
        if stopping.is_set():
            return EXIT_CODES["Stopped"]
        before = job.name if job else ""
        launch(options, recipe, overrides)
        job = answer_of(submitted)
    elif other := [f"--{key}={value}" for key, value in overrides.items() if f"--{key}={value}" not in job.arguments]:
        raise UserError(
            f"{job.name} is a job of this run with other values than {other[0]}; choose another name of the sweep"
        )
    name = job.name
    while True:
        status = answer_of(lambda: _poll(clients, name, stopping.is_set()))
        answer_of(lambda: fetch(options, folder, clients))
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
        clients.sagemaker.stop_training_job(TrainingJobName=name)
        print(f"stopping {name}: it saves a checkpoint within 120 seconds")
    return status


if __name__ == "__main__":
    main()
