"""A run in processes of its own, started as a user does, and seen from outside: what it does now, and what it has recorded."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlike.distributed import environment

ROOT = Path(__file__).parents[1]
MARK = "TITANLIKE_BENCHMARK"  # a variable that all processes of a start have, and no other
CUT_SHORT = 4096  # bytes at a file's end that hold its last record


def newest_record(metrics: Path) -> int:
    """The last step that is recorded; 0 if there is none."""
    with suppress(FileNotFoundError), metrics.open("rb") as stream:
        stream.seek(max(0, metrics.stat().st_size - CUT_SHORT))
        for line in reversed(stream.read().splitlines()):
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and "loss" in record:
                    return record["step"]
    return 0


class Start:
    """One `./run_train.sh`. Linux alone can tell what came of it."""

    def __init__(self, words: list[str], run: Path, ranks: int) -> None:
        self.run, self.metrics = run, run / "metrics.jsonl"
        self.said = run.parent / f"{run.name}.log"
        self._metrics_before = self._inode()
        self._first_step: float | None = None
        self._mark = secrets.token_hex(8)
        variables = environment.child_environment({MARK: self._mark, "NPROC": str(ranks), "OMP_NUM_THREADS": "1"})
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
        self.began = time.monotonic()
        with self.said.open("w") as log:
            self.process = subprocess.Popen(
                [str(ROOT / "run_train.sh"), *words], env=variables, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    @property
    def exit_code(self) -> int | None:
        """Of the launcher, if that has ended."""
        return self.process.poll()

    def log(self) -> str:
        """The end of what it has said."""
        return self.said.read_text(errors="replace")[-3000:]

    def processes(self) -> dict[int, bool]:
        """All that live, by number: whether it is a rank."""
        self.process.poll()  # so that a dead launcher is no more there
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it has ended meanwhile, or is another user's
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    if f"{MARK}={self._mark}".encode() in variables:
                        found[int(entry.name)] = any(each.startswith(b"RANK=") for each in variables)
        return found

    def ranks(self) -> list[int]:
        """Those that train."""
        return [process for process, is_rank in self.processes().items() if is_rank]

    def send(self, number: int, processes: list[int]) -> None:
        """Send a signal to some of its processes."""
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def end(self) -> int:
        """Kill what is left of it. How many that were."""
        left = list(self.processes())
        self.send(signal.SIGKILL, left)
        self.process.wait()
        return len(left)

    def resumed(self) -> int | None:
        """The step that it goes on from; None before it has opened the run's folder."""
        if self._inode() in (None, self._metrics_before):
            return None
        return json.loads((self.run / "environment.json").read_text())["resumed_step"]

    def first_step(self) -> float | None:
        """Seconds to its first step, as seen by who asks again and again; None before."""
        if self._first_step is None:
            resumed = self.resumed()
            if resumed is not None and newest_record(self.metrics) > resumed:
                self._first_step = self.seconds
        return self._first_step

    def reading(self, folder: Path, ranks: list[int]) -> bool:
        """Whether a rank has a file open below a folder."""
        return any(target.startswith(f"{folder}/") for rank in ranks for target in _open_files(rank))

    def until(self, happens: Callable[[], Any], seconds: float, pause: float = 0.005) -> bool:
        """Wait for something, so long at most, or until the launcher has ended. Whether it happened."""
        end = time.monotonic() + seconds
        while not happens():
            if time.monotonic() > end or self.exit_code is not None:
                return False
            time.sleep(pause)
        return True

    def _inode(self) -> int | None:
        """Which file the records are: a start that takes them up makes a new one of that name."""
        with suppress(FileNotFoundError):
            return self.metrics.stat().st_ino
        return None


def _open_files(process: int) -> Iterator[str]:
    with suppress(OSError):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                yield str(entry.readlink())
