"""Runs the trials of a sweep: starts, watches, prunes and stops them."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from titanlike.config import UserError
from titanlike.tools.metrics_file import read_records
from titanlike.tools.sweep.config import SweepPlan, recipe_text
from titanlike.tools.sweep.processes import STOPPED, TrialRun, slots, start_run, values_of
from titanlike.tools.sweep.results import Trial, settings_text, trial_line, write_results
from titanlike.tools.sweep.study import Study
from titanlike.utils.atomic_write import atomic_write_text
from titanlike.utils.file_lock import FileLock, LockHeld
from titanlike.utils.live_line import LiveLine

POLL_INTERVAL = 0.25  # seconds
KILL_DELAY = 30  # seconds after run.shutdown_timeout
MAX_FAILURES = 3  # in a row from the start
Start = Callable[[Trial, Mapping[str, str]], TrialRun]


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

        if plan.sweep.resources.backend == "ray":
            from titanlike.tools.sweep import ray_runs

            ray_runs.connect()

        def start(trial: Trial, variables: Mapping[str, str]) -> TrialRun:
            if plan.sweep.resources.backend == "ray":
                return ray_runs.RayRun(plan, trial.number, trial.settings)
            return start_run(plan, trial.number, trial.settings, variables)

        Scheduler(plan, study, start, slots(plan)).run()
    finally:
        lock.release()


@dataclass
class Active:
    """A trial that runs."""

    trial: Trial
    run: TrialRun
    started: float
    file_state: tuple[int, int] = (0, 0)
    last_step: int = 0
    stop_at: float = 0.0  # when it is killed, after a request to stop

    def request_stop(self, timeout: float) -> None:
        """Requests a graceful shutdown, once."""
        if not self.stop_at:
            self.stop_at = time.monotonic() + timeout
            self.run.stop()


class Scheduler:
    """Runs all trials of a study that have not ended, then new ones up to the number of the sweep."""

    def __init__(self, plan: SweepPlan, study: Study, start: Start, slots: list[dict[str, str]]) -> None:
        self.plan, self.study, self.start, self.slots = plan, study, start, slots
        self.active: dict[int, Active] = {}  # by slot
        self.line = LiveLine(plain_interval=30.0, transient=True)
        self.signal = 0

    def run(self) -> None:
        """Returns when all trials have ended. Raises `Interrupted` after a signal, and `UserError` if every trial fails."""
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
                for active in self.active.values():  # after an error only
                    active.run.kill()
        if self.signal:
            raise Interrupted(self.signal)

    def _fill(self, unfinished: list[Trial]) -> bool:
        """Starts trials in free slots. Returns whether it started one."""
        has_started = False
        for slot, variables in enumerate(self.slots):
            if slot in self.active or self.signal:
                continue
            if unfinished:
                trial, verb = unfinished.pop(0), "resumes"
            elif len(self.study.trials()) < self.plan.sweep.trials:
                trial, verb = self.study.create_trial(), "starts"
            else:
                break
            self.line.print(f"trial {trial.number} {verb}: {settings_text(trial.settings)}")
            self.active[slot] = Active(trial, self.start(trial, variables), time.monotonic())
            has_started = True
        return has_started

    def _watch(self, slot: int) -> None:
        active, number = self.active[slot], self.active[slot].trial.number
        code = active.run.poll()  # before the metrics are read: an ended run's are complete
        reason = self._report(active, force=code is not None)
        if reason or self.signal:
            active.request_stop(self.plan.known.run.shutdown_timeout + KILL_DELAY)
        if code is None:
            if active.stop_at and time.monotonic() > active.stop_at:
                active.run.kill()
            return
        del self.active[slot]
        if code == 0:
            self.study.complete(number)
        elif code in STOPPED or self.signal:
            if not (reason or self.signal):
                self.signal = max(1, code - 128)  # someone stopped this run, and so the sweep
                return
        else:
            self.study.fail(number, active.run.error())
        trial = self.study.trials()[number]
        if trial.state != "running":
            self.line.print(trial_line(trial, self.study.trials(), self.plan.sweep))
        self._write()
        self._refuse_to_continue(trial)

    def _report(self, active: Active, *, force: bool) -> str:
        """Reports new metrics of a run. Returns why it is pruned, or an empty string."""
        metrics = self.plan.run_path(active.trial.number) / "metrics.jsonl"
        state = _file_state(metrics)
        if state == active.file_state and not force:
            return ""
        active.file_state = state
        records = read_records(metrics)
        active.last_step = max((record["step"] for record in records), default=0)
        return self.study.report(active.trial.number, values_of(records, self.plan.sweep.metric))

    def _refuse_to_continue(self, trial: Trial) -> None:
        ended = [one for one in self.study.trials() if one.state != "running"]
        if trial.state == "failed" and len(ended) >= MAX_FAILURES and all(one.state == "failed" for one in ended):
            raise UserError(
                f"all of the first {len(ended)} trials failed, the last one because: {trial.reason}; correct this, delete "
                f"{self.plan.path} and start the sweep again"
            )

    def _write(self) -> None:
        write_results(self.plan, self.study.trials(), self.study.importance())

    def _update(self) -> None:
        """Shows one line for each running trial."""
        trials = self.study.trials()
        lines = []
        for active in self.active.values():
            trial = trials[active.trial.number]
            steps = trial.settings.get("training.steps", str(self.plan.known.training.steps))
            value = "" if trial.value is None else f"  {self.plan.sweep.metric} {trial.value:.6g}"
            seconds = f"{time.monotonic() - active.started:.0f} s"
            state = "  stopping" if active.stop_at else ""
            lines.append(f"trial {trial.number}  step {active.last_step}/{steps}{value}  {seconds}{state}")
        if lines:
            self.line.update("\n".join(lines))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Makes SIGINT and SIGTERM stop the trials, which save a checkpoint. A second signal kills them."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal:
                for active in self.active.values():
                    active.run.kill()
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


def _file_state(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
