"""Starts a run as a user does, and observes its processes and files from outside."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from titanlike.distributed import launch_config

MARK = "TITANLIKE_BENCHMARK"  # environment variable that identifies the processes of a start
TAIL_SIZE = 4096  # bytes at the end of a file that contain its last record


def newest_record(metrics: Path) -> int:
    """Returns the last recorded step, or 0."""
    with suppress(FileNotFoundError), metrics.open("rb") as stream:
        stream.seek(max(0, metrics.stat().st_size - TAIL_SIZE))
        for line in reversed(stream.read().splitlines()):
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and "loss" in record:
                    return record["step"]
    return 0


class Start:
    """A start of `./run_train.sh`. Linux only: observes it in /proc."""

    def __init__(self, arguments: list[str], run: Path, ranks: int, more: Mapping[str, str] | None = None) -> None:
        """`more` are environment variables."""
        self.run, self.metrics = run, run / "metrics.jsonl"
        self.log_file = run.parent / f"{run.name}.log"
        self._metrics_before = self._inode()
        self._first_step: float | None = None
        self._mark = secrets.token_hex(8)
        variables = launch_config.child_environment({MARK: self._mark, "NPROC": str(ranks), "OMP_NUM_THREADS": "1"})
        variables |= more or {}
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
        self.started = time.monotonic()
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [str(ROOT / "run_train.sh"), *arguments], env=variables, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def exit_code(self) -> int | None:
        """Exit code of the launcher, or None while it runs."""
        return self.process.poll()

    def log(self) -> str:
        """Returns the end of the output."""
        return self.log_file.read_text(errors="replace")[-3000:]

    def processes(self) -> dict[int, bool]:
        """Returns the running processes: whether each is a rank, by pid."""
        self.process.poll()  # reaps a dead launcher
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it has exited, or belongs to another user
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    if f"{MARK}={self._mark}".encode() in variables:
                        found[int(entry.name)] = any(variable.startswith(b"RANK=") for variable in variables)
        return found

    def ranks(self) -> list[int]:
        """Returns the pids of the ranks."""
        return [process for process, is_rank in self.processes().items() if is_rank]

    def send(self, number: int, processes: list[int]) -> None:
        """Sends a signal to processes."""
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def end(self) -> int:
        """Kills the remaining processes. Returns their number."""
        remaining = list(self.processes())
        self.send(signal.SIGKILL, remaining)
        self.process.wait()
        return len(remaining)

    def resumed(self) -> int | None:
        """Returns the step that it resumed from, or None before it has opened the run directory."""
        if self._inode() in (None, self._metrics_before):
            return None
        return json.loads((self.run / "environment.json").read_text())["resumed_step"]

    def first_step(self) -> float | None:
        """Returns the seconds to the first step, or None before it. Must be polled."""
        if self._first_step is None:
            resumed = self.resumed()
            if resumed is not None and newest_record(self.metrics) > resumed:
                self._first_step = self.seconds
        return self._first_step

    def reading(self, folder: Path, ranks: list[int]) -> bool:
        """Returns whether a rank has a file open below a directory."""
        return any(target.startswith(f"{folder}/") for rank in ranks for target in _open_files(rank))

    def until(self, condition: Callable[[], Any], seconds: float, pause: float = 0.005) -> bool:
        """Waits for a condition. Returns False after `seconds`, or when the launcher has exited."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.exit_code is not None:
                return False
            time.sleep(pause)
        return True

    def _inode(self) -> int | None:
        """Returns the inode of the metrics file, which every start replaces."""
        with suppress(FileNotFoundError):
            return self.metrics.stat().st_ino
        return None


def _open_files(process: int) -> Iterator[str]:
    with suppress(OSError):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                yield str(entry.readlink())
