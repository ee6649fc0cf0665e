"""Runs the trials of a sweep, each in a process: starts, watches, prunes and stops them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import printable
from titanlike.config.shipped import REPOSITORY
from titanlike.distributed import launch_config
from titanlike.tools.metrics_file import read_records
from titanlike.tools.programs import effective_overrides
from titanlike.tools.sweep.config import SweepPlan, recipe_text
from titanlike.tools.sweep.results import Trial, settings_text, trial_line, write_results
from titanlike.tools.sweep.study import Study
from titanlike.utils.atomic_write import atomic_write_text
from titanlike.utils.file_lock import FileLock, LockHeld, is_locked
from titanlike.utils.live_line import LiveLine
from titanlike.utils.system import share_cores, signal_at_parent_death, visible_gpus

JOB_OF_TRIAL = "titanlike.tools.clusters.sagemaker.trial"
STOPPED = [128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]  # exit codes
POLL_INTERVAL = 0.25  # seconds
LOCK_POLL = 0.5
KILL_DELAY = 30  # seconds after run.shutdown_timeout
MAX_FAILURES = 3  # of the first trials, after which no other one starts


class TrialRun:
    """The run of a trial as a child process, whose output is in `RUN.log` beside the run directory. It resumes from its newest
    checkpoint."""

    def __init__(self, plan: SweepPlan, trial: Trial, variables: Mapping[str, str]) -> None:
        """Starts the run with the variables of its slot, after the process of a killed sweep has left it."""
        self.number, self.started = trial.trial, time.monotonic()
        self.size = self.last_step = 0  # of the metrics file, when it was read
        self.stop_at = 0.0  # when it is killed, after a request to stop
        folder, resources = plan.run_path(trial.trial), plan.sweep.resources
        wait_for_lock(folder / "lock")
        is_job = resources.backend == "sagemaker" and "--simulate" not in resources.options
        on_death = signal.SIGKILL if is_job else signal.SIGTERM  # a job continues, and the next process attaches to it
        environment = launch_config.child_environment(variables)
        environment["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{environment.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        self._log = folder.with_name(f"{folder.name}.log")
        with self._log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                run_command(plan, trial.trial, trial.settings),
                env=environment,
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
        self._process.terminate()

    def kill(self) -> None:
        """Ends all processes of the run."""
        if self.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def error(self) -> str:
        """Returns the last error of the run's output, or its last line."""
        text = self._log.read_bytes()[self._start :].decode(errors="replace")
        lines = [printable(line) for line in text.splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        code = self.poll()
        end = f"ended by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return f"{[*errors, *lines[-1:], 'no output'][0]} ({end})"


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


def slots(plan: SweepPlan) -> list[dict[str, str]]:
    """Returns the environment variables of each trial that runs at the same time."""
    resources = plan.sweep.resources
    if resources.backend != "local":
        return [{}] * max(1, resources.parallel)
    size = max(1, resources.gpus_per_trial)
    gpus = visible_gpus() if resources.gpus_per_trial else []
    parallel = resources.parallel or max(1, len(gpus) // size)
    if gpus and parallel * size > len(gpus):
        raise UserError(
            f"resources.parallel = {parallel} and gpus_per_trial = {size} need {parallel * size} GPUs, but this machine has "
            f"{len(gpus)}; reduce one of them"
        )
    processes = plan.num_processes()
    shared = {"NPROC": str(processes), **(share_cores(parallel * processes) if parallel > 1 else {})}
    firsts = range(0, parallel * size, size)
    return [{**shared, "CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + size])} for first in firsts]


def wait_for_lock(path: Path) -> None:
    """Waits until no process trains in a run directory: a killed sweep's saves a checkpoint first."""
    if is_locked(path):
        print(f"waiting for {path.read_text().strip()}, which trains in {path.parent}", flush=True)
    while is_locked(path):
        time.sleep(LOCK_POLL)


class Interrupted(Exception):
    """Raised after the running trials were stopped. They resume with the next start of the sweep."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


def run_sweep(plan: SweepPlan) -> None:
    """Runs a sweep to its end, from wherever an earlier process left it. Writes its results."""
    try:
        lock = FileLock(plan.path / "lock")
    except LockHeld as holder:
        raise UserError(f"{plan.path} is in use by {holder}; end that process, or choose another name") from None
    try:
        study = Study(plan)
        atomic_write_text(plan.path / "recipe.toml", recipe_text(plan, {}))  # later changes do not affect the trials
        Scheduler(plan, study, slots(plan)).run()
    finally:
        lock.release()


class Scheduler:
    """Runs all trials of a study that have not ended, then new ones up to the number of the sweep."""

    def __init__(self, plan: SweepPlan, study: Study, slots: list[dict[str, str]]) -> None:
        self.plan, self.study, self.slots = plan, study, slots
        self.active: dict[int, TrialRun] = {}  # by slot
        self.line = LiveLine(plain_interval=30.0, transient=True)
        self.signal = 0

    def run(self) -> None:
        """Returns when all trials have ended. Raises `Interrupted` after a signal."""
        unfinished = [trial for trial in self.study.trials() if trial.state == "running"]
        self._write()
        with self._signals():
            try:
                while self._fill(unfinished) or self.active:
                    for slot in list(self.active):
                        self._watch(slot)
                    self._update()
                    if self.active:
                        time.sleep(POLL_INTERVAL)
            finally:
                self.line.close()
                for run in self.active.values():  # after an error only
                    run.kill()
        if self.signal:
            raise Interrupted(self.signal)

    def _fill(self, unfinished: list[Trial]) -> bool:
        """Starts trials in free slots. Returns whether it started one."""
        has_started = False
        for slot, variables in enumerate(self.slots):
            if slot in self.active or self.signal:
                continue
            trials = self.study.trials()
            states = [trial.state for trial in trials if trial.state != "running"]
            all_failed = len(states) >= MAX_FAILURES and set(states) == {"failed"}
            if unfinished:
                trial, verb = unfinished.pop(0), "resumes"
            elif len(trials) < self.plan.sweep.trials and not all_failed:
                trial, verb = self.study.create_trial(), "starts"
            else:
                break
            self.line.print(f"trial {trial.trial} {verb}: {settings_text(trial.settings)}")
            self.active[slot] = TrialRun(self.plan, trial, variables)
            has_started = True
        return has_started

    def _watch(self, slot: int) -> None:
        run = self.active[slot]
        code = run.poll()  # before the metrics are read: an ended run's are complete
        reason = self._report(run, force=code is not None)
        if code is None:
            if (reason or self.signal) and not run.stop_at:
                run.stop_at = time.monotonic() + self.plan.known.run.shutdown_timeout + KILL_DELAY
                run.stop()
            if run.stop_at and time.monotonic() > run.stop_at:
                run.kill()
            return
        del self.active[slot]
        if code == 0:
            self.study.complete(run.number)
        elif code not in STOPPED and not self.signal:
            self.study.fail(run.number, run.error())
        elif not reason:
            self.signal = self.signal or code - 128  # someone stopped this run, and so the sweep
        trials = self.study.trials()
        if trials[run.number].state != "running":
            self.line.print(trial_line(trials[run.number], trials, self.plan.sweep))
        self._write()

    def _report(self, run: TrialRun, *, force: bool) -> str:
        """Reports new metrics of a run. Returns why it is pruned, or an empty string."""
        metrics = self.plan.run_path(run.number) / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        if size == run.size and not force:
            return ""
        run.size = size
        records = read_records(metrics)
        run.last_step = max((record["step"] for record in records), default=0)
        return self.study.report(run.number, records)

    def _write(self) -> None:
        write_results(self.plan, self.study.trials(), self.study.importance())

    def _update(self) -> None:
        """Shows one line for each running trial."""
        trials = self.study.trials()
        lines = []
        for run in self.active.values():
            trial = trials[run.number]
            steps = trial.settings.get("training.steps", str(self.plan.known.training.steps))
            value = "" if trial.value is None else f"  {self.plan.sweep.metric} {trial.value:.6g}"
            seconds = f"{time.monotonic() - run.started:.0f} s"
            state = "  stopping" if run.stop_at else ""
            lines.append(f"trial {run.number}  step {run.last_step}/{steps}{value}  {seconds}{state}")
        if lines:
            self.line.update("\n".join(lines))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Makes SIGINT and SIGTERM stop the trials, which save a checkpoint. A second signal kills them."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal:
                for run in self.active.values():
                    run.kill()
            elif number == signal.SIGINT and self.active:  # not print: the signal may have interrupted one
                os.write(2, b"\nstopping the trials, which save a checkpoint; press Ctrl-C again to kill them\n")
            self.signal = number
            if not self.active:  # waits for a run of a killed sweep
                raise Interrupted(number)

        previous: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
