"""The processes of trials: how they start on each backend, their GPUs, their metrics and their end. Does not import torch."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from titanlike.config import UserError
from titanlike.config.base import printable
from titanlike.config.shipped import REPOSITORY
from titanlike.distributed import launch_config
from titanlike.tools.programs import effective_overrides
from titanlike.tools.sweep.config import JOB_OF_TRIAL, Resources, SweepPlan
from titanlike.utils.file_lock import FileLock, LockHeld
from titanlike.utils.system import share_cores, signal_at_parent_death, visible_gpus

STOPPED = [128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]  # exit codes
LOCK_POLL = 0.5  # seconds


class TrialRun(Protocol):
    """The run of a trial. It resumes from its newest checkpoint."""

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs."""

    def stop(self) -> None:
        """Requests that the run saves a checkpoint and ends."""

    def kill(self) -> None:
        """Ends all processes of the run."""

    def error(self) -> str:
        """Returns why the run failed."""


class RunProcess:
    """A run as a child process, whose output is in `RUN.log` beside the run directory."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        on_death: signal.Signals,
        folder: str | None = None,
    ) -> None:
        """Starts the command in a folder. It receives the signal `on_death` if this process dies."""
        self.log = log
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=launch_config.child_environment({"PYTHONPATH": _python_path(), **variables}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C stops it through this process
                preexec_fn=partial(signal_at_parent_death, os.getpid(), on_death),
            )

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Requests that the run saves a checkpoint and ends."""
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends all processes of the run."""
        if self.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def error(self) -> str:
        """Returns the last error of the run's output, or its last line."""
        text = self.log.read_bytes()[self._start :].decode(errors="replace")
        lines = [printable(line) for line in text.splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        code = self.poll()
        end = f"ended by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return f"{[*errors, *lines, 'no output'][0] if errors else lines[-1] if lines else 'no output'} ({end})"


def start_run(
    plan: SweepPlan, number: int, settings: Mapping[str, str], variables: Mapping[str, str], cwd: str | None = None
) -> RunProcess:
    """Starts the run of a trial with the variables of its slot, after the process of a killed sweep has left the run."""
    folder = plan.run_path(number)
    wait_for_lock(folder / "lock")
    resources = plan.sweep.resources
    is_job = resources.backend == "sagemaker" and "--simulate" not in resources.options
    on_death = signal.SIGKILL if is_job else signal.SIGTERM  # a job continues, and the next process attaches to it
    log = folder.with_name(f"{folder.name}.log")
    return RunProcess(run_command(plan, number, settings), variables, log, on_death, cwd)


def run_command(plan: SweepPlan, number: int, settings: Mapping[str, str]) -> list[str]:
    """Returns the command that starts or resumes the run of a trial."""
    resources = plan.sweep.resources
    own = {"run.dir": str(plan.path), "run.name": plan.run_name(number)}
    if plan.known.checkpoint.dir and resources.backend != "sagemaker":
        own["checkpoint.dir"] = f"{plan.known.checkpoint.dir.rstrip('/')}/{plan.sweep.name}"
    effective = effective_overrides(plan.recipe, {**own, **settings})
    overrides = [f"--{key}={value}" for key, value in effective.items()]
    recipe = str(plan.path / "recipe.toml")
    if resources.backend == "sagemaker":
        return [sys.executable, "-m", JOB_OF_TRIAL, recipe, *resources.options, *overrides]
    return [sys.executable, str(REPOSITORY / "titanlike/run/launch.py"), recipe, *overrides]


def slots(plan: SweepPlan, gpus: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Returns the environment variables of each trial that runs at the same time."""
    resources: Resources = plan.sweep.resources
    if resources.backend != "local":
        return [{}] * max(1, resources.parallel)
    gpus = visible_gpus() if gpus is None else gpus
    processes = {"NPROC": str(plan.num_processes())}
    if not gpus or not resources.gpus_per_trial:
        parallel = max(1, resources.parallel)
        cores = share_cores(parallel * plan.num_processes()) if parallel > 1 else {}
        return [{**processes, **cores, "CUDA_VISIBLE_DEVICES": ""}] * parallel
    size = resources.gpus_per_trial
    parallel = resources.parallel or max(1, len(gpus) // size)
    if parallel * size > len(gpus):
        raise UserError(
            f"resources.parallel = {parallel} and gpus_per_trial = {size} need {parallel * size} GPUs, but this machine has "
            f"{len(gpus)}; reduce one of them"
        )
    cores = share_cores(parallel * plan.num_processes())
    return [
        {**processes, **cores, "CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + size])}
        for first in range(0, parallel * size, size)
    ]


def wait_for_lock(path: Path) -> None:
    """Waits until no process trains in a run directory: a killed sweep's saves a checkpoint first."""
    is_reported = False
    while path.exists():
        try:
            FileLock(path).release()
            return
        except LockHeld as holder:
            if not is_reported:
                print(f"waiting for {holder}, which trains in {path.parent}", flush=True)
            is_reported = True
            time.sleep(LOCK_POLL)


def values_of(records: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Returns a metric by step. A value that is not finite, null in the file, is NaN."""
    found = {record["step"]: record[metric] for record in records if metric in record}
    return [(step, math.nan if value is None else float(value)) for step, value in sorted(found.items())]


def _python_path() -> str:
    inherited = launch_config.child_environment({}).get("PYTHONPATH", "")
    return f"{REPOSITORY}{os.pathsep}{inherited}" if inherited else str(REPOSITORY)
