"""Watchdog for a hanging run: names the missing rank, dumps the stacks of the others, and ends the job.

The watchdog thread measures the time without a training step. Of several ranks, each has a second thread, which publishes its
heartbeat: it accesses the job's key-value store, which may block forever. The watchdog thread detects that as well.
"""

import faulthandler
import os
import platform
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from titanlike.distributed import environment, process_group
from titanlike.distributed.heartbeat import Heartbeat, HeartbeatThread
from titanlike.utils import compat

if TYPE_CHECKING:
    from torch import nn

PAUSE_TIMEOUT = 600.0  # seconds, at least, for a first step that compiles, validation and checkpointing


def group_timeout(hang_timeout: float) -> float:
    """Returns a process group timeout in seconds, long enough for the watchdog to report a hang first."""
    return max(hang_timeout, PAUSE_TIMEOUT) + 120.0


class Watchdog:
    """Ends the process with a report if the job makes no progress for `timeout` seconds.

        with Watchdog(600, run_dir) as watchdog:
            ...
            for step in ...:
                watchdog.step(step)
            watchdog.finish()
            ...

    A rank without heartbeats is a hang at any time. Ranks that are alive may take as long as they need before the first step and
    after `finish`, at least `PAUSE_TIMEOUT` seconds in the first step and in `pause`, or for each forward pass there, and `timeout`
    seconds in every other step.

    One live rank names the missing rank on stderr. Every live rank writes its stacks and torch's flight records to
    `run_dir/hang`, then exits with code `EXIT_RANK_MISSING`.
    """

    def __init__(self, timeout: float, run_dir: Path) -> None:
        self.timeout, self.directory = timeout, run_dir / "hang"
        self.interval = min(1.0, timeout / 20)
        self.store_timeout = max(5.0, 10 * self.interval)
        self.silence = max(self.store_timeout, timeout / 2)  # of a missing rank
        self.rank, self.world_size = process_group.rank(), process_group.world_size()
        self.heartbeat = Heartbeat(step=0, host=platform.node(), pid=os.getpid(), ppid=os.getppid())
        self._progress = 0
        self._is_training = False
        self._last_answer = 0.0  # of the store, in seconds without progress
        self._ending = False
        self._training_thread = threading.get_ident()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._monitor, name="watchdog", daemon=True)
        self._heartbeats: HeartbeatThread | None = None
        if self.world_size > 1:
            self._heartbeats = HeartbeatThread(
                self.heartbeat,
                self.rank,
                self.world_size,
                interval=self.interval,
                timeout=self.store_timeout,
            )

    def step(self, step: int) -> None:
        """Records the start of a training step."""
        self.heartbeat.step = step
        self.heartbeat.paused = not self._is_training  # the first step compiles
        self._is_training = True
        self._progress += 1

    def finish(self) -> None:
        """Records the end of the training loop."""
        self.heartbeat.paused, self._is_training = True, False
        self._progress += 1

    @contextmanager
    def pause(self, model: "nn.Module | None" = None) -> Iterator[None]:
        """Allows `PAUSE_TIMEOUT` seconds, or `timeout` if that is more, for work that may take longer than a step. With `model`, as
        much for each of its forward passes."""
        before, self.heartbeat.paused = self.heartbeat.paused, True
        modules = [model, *model.children()] if model else []  # a pipeline may call its stage only
        hooks = [module.register_forward_pre_hook(self._count) for module in modules]
        try:
            yield
        finally:
            self._progress += 1
            self.heartbeat.paused = before
            for hook in hooks:
                hook.remove()

    def _count(self, *_: object) -> None:
        self._progress += 1

    def __enter__(self) -> "Watchdog":
        if self._heartbeats:
            self._heartbeats.start()
            self._heartbeats.call(lambda _: None)  # publishes: a rank that is stopped in its first step is known, too
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._ending:  # an exception may follow from the exit of other ranks: the report explains it
            self._thread.join()
        self.heartbeat.paused, self.heartbeat.finished = False, True
        self._stop_event.set()
        self._thread.join(self.store_timeout)
        if self._heartbeats:
            self._heartbeats.stop()

    def _monitor(self) -> None:
        progress, stalled, before = 0, 0.0, time.monotonic()
        while not self._stop_event.wait(self.interval):
            now = time.monotonic()
            # Bounded: the time during which the whole job was suspended does not count.
            stalled += min(now - before, self.interval + self.store_timeout)
            before = now
            if self._progress != progress:
                progress, stalled = self._progress, 0.0
            if (self._heartbeats and self._heartbeats.is_alarm_raised) or self._is_hang(stalled):
                self._end(stalled)

    def _is_hang(self, stalled: float) -> bool:
        if self._is_training and stalled > max(self.timeout, PAUSE_TIMEOUT):
            return True
        if self._heartbeats is None:
            return stalled > self.timeout and not self.heartbeat.paused
        if stalled <= self.timeout / 2:
            self._last_answer = stalled
            return False
        # Read early enough to know the silent ranks at the timeout.
        found = self._heartbeats.call(partial(self._heartbeats.read_all, silence=self.silence))
        if found:
            self._last_answer = stalled
        if stalled <= self.timeout:
            return False
        heartbeats, silent = found or ({self.rank: self.heartbeat}, [])
        # Live ranks may take longer while one of them is paused. A rank that was stopped during a pause is silent.
        is_missing = bool(silent) or stalled - self._last_answer > self.silence
        return is_missing or not any(heartbeat and heartbeat.paused for heartbeat in heartbeats.values())

    def _end(self, stalled: float) -> NoReturn:
        """Raises the alarm, or responds to it: dumps stacks, reports, and exits together with the other ranks."""
        self._ending, heartbeats = True, self._heartbeats
        signal.alarm(int(15 * self.store_timeout))  # ends the process if this hangs, too
        try:
            is_reporter = heartbeats.call(lambda store: store.add("alarm", 1) == 1) if heartbeats else None
            self.heartbeat.location = stack_location(sys._current_frames().get(self._training_thread))
            dump = threading.Thread(target=self._dump, daemon=True)  # a hanging file system may be the cause
            dump.start()
            dump.join(self.store_timeout)
            self.heartbeat.dumped = True
            if heartbeats is None:
                self._report(stalled, [f"the process waits in {self.heartbeat.location}"])
            elif is_reporter is False:
                heartbeats.wait_for_report()
            # Without the store no rank can be elected, and rank 0's host may be down.
            elif is_reporter or environment.is_first_on_node() or self.rank == 1:
                self._report(stalled, heartbeats.diagnose(is_reporter=bool(is_reporter)))
            if heartbeats and is_reporter:
                heartbeats.call(lambda store: store.set("reported", ""))
                time.sleep(0.5)  # the other ranks exit first: this process may host the store
        finally:
            os._exit(environment.EXIT_RANK_MISSING)

    def _report(self, stalled: float, findings: list[str]) -> None:
        step, directory = self.heartbeat.step, self.directory
        where = f"at step {step}" if step else "before the first step"
        lines = [
            f"the run hangs: no progress for {stalled:.0f} s {where} (run.hang_timeout = {self.timeout:g})",
            *findings,
            f"stack traces and flight records of the live ranks: {directory}",
        ]
        # Not through sys.stderr: the training thread may hold its lock.
        os.write(2, "".join(f"error: {line}\n" for line in lines).encode())

    def _dump(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / f"rank-{self.rank:05d}.txt").open("w") as file:
                file.write(
                    f"rank {self.rank}, pid {os.getpid()} on {platform.node()}, at step {self.heartbeat.step}. "
                    f"The training thread is {self._training_thread:#018x}:\n\n"
                )
                file.flush()
                faulthandler.dump_traceback(file)
            for name, records in compat.flight_records().items():
                (self.directory / f"{name}_{self.rank:05d}").write_bytes(records)
        except OSError as error:
            os.write(2, f"error: {self.directory}: {error}\n".encode())


def stack_location(frame: FrameType | None) -> str:
    """Returns the innermost function of a stack, and the innermost one outside libraries if that is another."""
    libraries = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"], "<frozen")
    frames = [one for one, _ in traceback.walk_stack(frame)] if frame else []
    own = [one for one in frames if not any(library in one.f_code.co_filename for library in libraries)]
    lines = []
    for one in frames[:1] + own[:1]:
        path = "/".join(Path(one.f_code.co_filename).parts[-3:])
        lines.append(f"{one.f_code.co_name} ({path}:{one.f_lineno})")
    return ", called from ".join(dict.fromkeys(lines)) or "code without a Python frame"
