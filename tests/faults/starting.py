"""Jobs without a launcher: each rank is a process with its own session, environment and command line, as under torchrun."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.faulty import PROGRAM, Fault, variables
from tests.forkserver import ROOT, Forked
from tests.launching import SMALL, environment, free_port

OPTIONS = SMALL | {
    "program": str(PROGRAM), "run.name": "run", "model.dim": "32", "model.ffn_dim": "64", "training.global_batch_size": "4",
    "training.local_batch_size": "1", "checkpoint.interval": "2", "checkpoint.keep": "9", "validation.interval": "3",
    "validation.batches": "1", "data.source": "text", "data.path": str(ROOT / "README.md"),
}  # fmt: skip


class Job:
    """The processes of one launch."""

    def __init__(self, folder: Path, ranks: list[subprocess.Popen[Any]]) -> None:
        self.folder = folder
        self.ranks = ranks

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of all ranks as in `subprocess`: None while running, -9 after SIGKILL."""
        return [rank.poll() for rank in self.ranks]

    def wait(self, seconds: float = 150.0) -> list[int]:
        """Returns the exit codes when all ranks have exited."""
        end = time.monotonic() + seconds
        while not self._is_over():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"ranks did not exit within {seconds} s: {self.codes}\n{self.output}")
            time.sleep(0.01)
        return [rank.returncode for rank in self.ranks]

    def wait_for_a_death(self, seconds: float = 150.0) -> list[int]:
        """Terminates the other ranks after one has died, as torchrun does. Returns all exit codes."""
        end = time.monotonic() + seconds
        while not self._is_over() and not any(self.codes):
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"no rank died within {seconds} s\n{self.output}")
            time.sleep(0.01)
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to all running ranks."""
        for rank in self.ranks:
            rank.send_signal(number)

    def kill(self) -> None:
        """Kills the running ranks."""
        self.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.wait(timeout=60)

    def wait_for(self, path: Path, seconds: float = 150.0) -> None:
        """Waits for a file. Fails if the job ends first."""
        end = time.monotonic() + seconds
        while not path.exists():
            assert not self._is_over() and time.monotonic() < end, f"{path} did not appear\n{self.output}"
            time.sleep(0.01)

    def wait_for_output(self, text: str, seconds: float = 150.0) -> None:
        """Waits for output."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end, self.output
            time.sleep(0.01)

    @property
    def output(self) -> str:
        """The output of all ranks, in the order of ranks."""
        return "".join((self.folder / f"rank-{rank}.txt").read_text() for rank in range(len(self.ranks)))

    def _is_over(self) -> bool:
        return None not in self.codes


class Starter:
    """Starts jobs, and kills the remaining ones."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def start(self, folder: Path, *faults: Fault, processes: int = 2, **overrides: str) -> Job:
        """Starts a job in a directory."""
        options = [f"--{key}={value}" for key, value in (OPTIONS | overrides).items()]
        job = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks: list[subprocess.Popen[Any]] = []
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables(*faults)
            with (folder / f"rank-{rank}.txt").open("wb") as output:
                ranks.append(
                    Forked(
                        [sys.executable, str(PROGRAM), *options], cwd=folder, env=environment(**job, **own),
                        stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                    )
                )  # fmt: skip
        self.jobs.append(Job(folder, ranks))
        return self.jobs[-1]

    def kill_jobs(self) -> None:
        """Kills all processes."""
        while self.jobs:
            self.jobs.pop().kill()
