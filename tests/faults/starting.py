"""Real ranks of a real job within a second: a process that has imported all there is to import forks them.

Each rank is a process with a session, an environment and a command line of its own, as under torchrun.
"""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.faulty import PROGRAM, Fault, variables
from tests.launching import ROOT, SMALL, environment

OPTIONS = SMALL | {
    "recipe": str(PROGRAM), "run.name": "run", "model.dim": "32", "model.ffn_dim": "64", "training.global_batch_size": "4",
    "training.local_batch_size": "1", "checkpoint.interval": "2", "checkpoint.keep": "9", "validation.interval": "3",
    "validation.batches": "1", "data.source": "text", "data.path": str(ROOT / "README.md"),
}  # fmt: skip


class Job:
    """The ranks of one start."""

    def __init__(self, starter: "Starter", folder: Path, pids: list[int]) -> None:
        self.starter = starter
        self.folder = folder
        self.pids = pids
        self.codes: dict[int, int] = {}

    def wait(self, seconds: float = 60.0) -> list[int]:
        """The exit codes of all ranks when the last has left: as Python's subprocess, -9 after SIGKILL."""
        end = time.monotonic() + seconds
        while not self._is_over():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"ranks did not end within {seconds} s: {self.codes}\n{self.said}")
            time.sleep(0.01)
        return [self.codes[pid] for pid in self.pids]

    def wait_for_a_death(self, seconds: float = 60.0) -> list[int]:
        """The same, when the others end as torchrun ends them if one has died."""
        end = time.monotonic() + seconds
        while not self._is_over() and not any(self.codes.values()):
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"nobody died within {seconds} s\n{self.said}")
            time.sleep(0.01)
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: int) -> None:
        """Send all ranks a signal."""
        for pid in self.pids:
            if pid not in self.codes:
                os.kill(pid, number)

    def kill(self) -> None:
        """End what is left."""
        if not self._is_over():
            self.signal(signal.SIGKILL)
            self.wait()

    def wait_for(self, path: Path, seconds: float = 60.0) -> None:
        """Wait for a file, unless the job is over before."""
        end = time.monotonic() + seconds
        while not path.exists():
            assert not self._is_over() and time.monotonic() < end, f"{path} did not appear\n{self.said}"
            time.sleep(0.01)

    def wait_until_said(self, text: str, seconds: float = 60.0) -> None:
        """Wait for something to be printed."""
        end = time.monotonic() + seconds
        while text not in self.said:
            assert time.monotonic() < end, self.said
            time.sleep(0.01)

    @property
    def said(self) -> str:
        """All that was printed, by one rank after the other."""
        return "".join((self.folder / f"rank-{rank}.txt").read_text() for rank in range(len(self.pids)))

    def _is_over(self) -> bool:
        for pid in self.pids:
            if pid not in self.codes and (code := self.starter.ask(poll=pid)) is not None:
                self.codes[pid] = code
        return len(self.codes) == len(self.pids)


class Starter:
    """The process that forks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.starting"], cwd=ROOT, env=environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.jobs: list[Job] = []

    def start(self, folder: Path, *faults: Fault, processes: int = 2, **overrides: str) -> Job:
        """Begin a job in a folder."""
        words = [f"--{key}={value}" for key, value in (OPTIONS | overrides).items()]
        job = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        pids = [
            self.ask(
                start=words,
                folder=str(folder),
                said=str(folder / f"rank-{rank}.txt"),
                variables=job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables(*faults),
            )
            for rank in range(processes)
        ]
        self.jobs.append(Job(self, folder, pids))
        return self.jobs[-1]

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that forks is gone"
        return json.loads(answer)

    def end_jobs(self) -> None:
        """Leave no process behind."""
        while self.jobs:
            self.jobs.pop().kill()

    def close(self) -> None:
        """Let go of the process that forks."""
        self.end_jobs()
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve() -> None:
    """Fork at request. What a job imports is imported here, once."""
    import recipes.pretrain  # noqa: F401

    gc.freeze()  # what is there already is no garbage of a rank's
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                be_rank(request)
        print(json.dumps(answer), flush=True)


def be_rank(request: dict[str, Any]) -> NoReturn:
    """What `python faulty.py WORDS` is in a process of its own."""
    os.setsid()
    os.chdir(request["folder"])
    said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(request["variables"])
    sys.argv = [str(PROGRAM), *request["start"]]
    runpy.run_path(str(PROGRAM), run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    serve()
