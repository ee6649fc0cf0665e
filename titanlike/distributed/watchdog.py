"""The watch over a run that hangs: it names the rank that is missing, keeps what the others were doing, and ends the job.

Beside the thread that trains, each rank has two. One counts how long that has been without a step. The other talks, through
the job's key-value store, and may block there for ever: where the store is gone, the first one sees that too.
"""

import faulthandler
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from titanlike.distributed import environment, process_group
from titanlike.distributed.heartbeat import Heartbeat, HeartbeatThread, diagnose_missing_ranks

PATIENCE = 600.0  # seconds, at least: for a first step that compiles, for validating and saving


def group_timeout(seconds: float) -> float:
    """How long the process group shall wait in a collective, so that the watch speaks first."""
    return max(seconds, PATIENCE) + 120.0


class Watchdog:
    """Ends the process, with a report, when the thread that made it has been without a step for so many seconds.

        with Watch(600, folder) as watch:
            for step in ...:
                watchdog.step(step)

    It counts from the first beat. Of the ranks that live, one says on stderr who is missing, and each leaves its stacks and
    torch's flight records in `folder/hang`.
    """

    def __init__(self, seconds: float, folder: Path) -> None:
        self.seconds, self.folder = seconds, folder / "hang"
        self.interval = min(1.0, seconds / 20)
        self.hearing = max(5.0, 10 * self.interval)  # who says nothing for so long is silent
        self.rank, self.world_size = process_group.rank(), process_group.world_size()
        self._step = self._beats = self._waits = 0
        self._trainer = threading.get_ident()
        self._place, self._dumped, self._left = "", False, False
        self._ending = False
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._roll_call = HeartbeatThread(self.rank, self.world_size, self._sign, self.interval, self.hearing)

    def step(self, step: int) -> None:
        """This step begins."""
        self._step = step
        self._beats += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What may take longer than a step: ten minutes at least."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self._beats += 1

    def __enter__(self) -> "Watchdog":
        if self.world_size > 1:
            self._roll_call.start()
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._ending:  # an error here is one of those that follow when others end: the report is the news
            self._watcher.join()
        self._left = True
        self._stop.set()
        self._watcher.join(self.hearing)
        self._roll_call.stop()

    @property
    def _is_patient(self) -> bool:
        return self._waits > 0 or self._beats < 2

    def _sign(self) -> Heartbeat:
        return Heartbeat(
            self._step,
            platform.node(),
            os.getpid(),
            time.time(),
            self._is_patient,
            self._place,
            self._dumped,
            self._left,
        )

    def _watch(self) -> None:
        seen, stuck, before = 0, 0.0, time.monotonic()
        while not self._stop.wait(self.interval):
            now = time.monotonic()
            # A moment at most: while the job was suspended as a whole, nobody was missing.
            stuck += min(now - before, self.interval + 1.0)
            before = now
            if self._beats != seen or not self._beats:
                seen, stuck = self._beats, 0.0
            someone_is_patient = self._is_patient or self._roll_call.num_patient > 0
            limit = max(self.seconds, PATIENCE) if someone_is_patient else self.seconds
            self._roll_call.listen(self.seconds < stuck < limit and not self._is_patient)
            if stuck > limit or self._roll_call.alarm:
                self._end(stuck)

    def _end(self, stuck: float) -> NoReturn:
        """Raise the alarm, or answer it: dump, report, and leave together."""
        self._ending = True
        signal.alarm(int(15 * self.hearing))  # the last resort, where even this hangs
        try:
            self._roll_call.raise_alarm()
            self._place = place(sys._current_frames().get(self._trainer))
            dump = threading.Thread(target=self._dump, daemon=True)  # a disk that hangs may be the cause
            dump.start()
            dump.join(self.hearing)
            self._dumped = True
            self._speak(stuck)
        finally:
            os._exit(environment.EXIT_RANK_MISSING)

    def _speak(self, stuck: float) -> None:
        """Report if this rank is the one to do it, and return when all may leave."""
        limit = f"run.hang_timeout = {self.seconds:g}"
        head = f"the run hangs: {stuck:.0f} seconds without progress in step {self._step} ({limit})"
        if self.world_size == 1:
            self._report([head, f"the process waits in {self._place}"])
        elif not self._roll_call.wait_for(lambda: self._roll_call.alarm, self.hearing):
            # Nobody can be asked who speaks. The store may be kept by rank 0, and rank 0's machine be gone.
            if environment.is_first_on_machine() or self.rank == 1:
                gone = "the job's key-value store does not answer: the machine that keeps it, rank 0's, is gone, or"
                self._report([head, f"{gone} its process is stopped", f"rank {self.rank} waits in {self._place}"])
        elif self._roll_call.is_reporter:
            signs, silent = self._roll_call.answers()
            self._report([head, *diagnose_missing_ranks(signs, silent, time.time())])
            _kill_siblings(signs[rank] for rank in silent)
            self._roll_call.tell()
        else:
            self._roll_call.wait_for(lambda: self._roll_call.told, 8 * self.hearing)

    def _report(self, lines: list[str]) -> None:
        lines.append(f"stacks and flight records of the ranks that live: {self.folder}")
        # Not through sys.stderr: the thread that trains may hold it.
        os.write(2, "".join(f"error: {line}\n" for line in lines).encode())

    def _dump(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"rank-{self.rank:05d}.txt").open("w") as file:
                file.write(
                    f"rank {self.rank}, pid {os.getpid()} on {platform.node()}, in step {self._step}. "
                    f"The thread that trains is {self._trainer:#018x}:\n\n"
                )
                file.flush()
                faulthandler.dump_traceback(file)
            for name, flight in flight_records().items():
                (self.folder / f"{name}_{self.rank:05d}").write_bytes(flight)
        except OSError as error:
            os.write(2, f"error: {self.folder}: {error}\n".encode())


def flight_records() -> dict[str, bytes]:
    """The last collectives as torch noted them, for `torchfrtrace`: of each backend that does."""
    backends = {"flight_nccl": "_dump_nccl_trace", "flight_gloo": "_dump_fr_trace"}
    library = getattr(torch._C, "_distributed_c10d", None)
    return {name: getattr(library, dump)() for name, dump in backends.items() if hasattr(library, dump)}


def place(frame: FrameType | None) -> str:
    """Where a thread is: the innermost function, and the first one outwards that is no library's."""
    inner, libraries = frame, ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"], "<frozen")
    while frame and any(library in frame.f_code.co_filename for library in libraries):
        frame = frame.f_back
    return ", called from ".join(dict.fromkeys(_line(f) for f in (inner, frame) if f)) or "what is no Python"


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({path.parent.name}/{path.name}:{frame.f_lineno})"


def _kill_siblings(signs: Iterable[Heartbeat | None]) -> None:
    """A stopped process does not hear that it shall end, and its launcher would wait half a minute for it. It is killed some
    moments later, after those that live have left: the launcher shall see their exit code."""
    for sign in signs:
        if sign and sign.host == platform.node() and _parent_of(sign.pid) == os.getppid():
            subprocess.Popen(["/bin/sh", "-c", f"sleep 3; kill -9 {sign.pid}"], stderr=subprocess.DEVNULL)


def _parent_of(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None
