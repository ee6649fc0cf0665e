"""Pools of processes in one gloo group. A distributed test is a function that every rank of a pool runs."""

import pickle
import socket
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch.distributed as dist

from tests import crashes
from tests.forkserver import ROOT, Forked
from titanlike.config import UserError


class Pool:
    """A pool of ranks, started at the first run and shared by tests. Restarted once its ranks have twice the initial threads.

    Process groups cannot be destroyed between runs, because torch caches meshes that refer to them. With gloo, each group has three
    polling threads: after many layouts, idle ranks would compete with working ones for the CPU. New processes take a tenth of a
    second.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.workers: list[Forked] = []
        self.pipes: list[Any] = []
        self.errors: list[IO[bytes]] = []  # standard error of each rank
        self.threads: list[int] = []  # maximum per rank, after each run

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Runs a function on each rank. Returns the results. If a rank fails, kills the others and raises its stack trace."""
        if not self.workers:
            self._start()
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments, named)))
        results: dict[int, Any] = {}
        threads = [0]
        while len(results) < self.world_size:
            ready = wait([p for rank, p in enumerate(self.pipes) if rank not in results], timeout=300)
            assert ready, f"no rank of {self.world_size} finished within 300 s"
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    failed, results[rank], count = pickle.loads(pipe.recv_bytes())
                    threads.append(count)
                except EOFError:
                    failed, results[rank] = True, self._death(rank)
                if failed:
                    self.close()
                    raise AssertionError(f"rank {rank} of {self.world_size}: {results[rank]}")
        self.threads.append(max(threads))
        if self.threads[-1] > 2 * self.threads[0]:
            self.close()  # the next run starts new processes
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Kills the processes."""
        for worker in self.workers:
            worker.kill()
            worker.wait()
        for file in (*self.pipes, *self.errors):
            file.close()
        self.workers, self.pipes, self.errors, self.threads = [], [], [], []

    def _death(self, rank: int) -> str:
        """Returns how a rank died, with what it wrote to standard error. Raises `Crash` if nobody sent the signal."""
        code = self.workers[rank].wait(timeout=60)
        self.errors[rank].seek(0)
        errors = self.errors[rank].read().decode(errors="replace")
        try:
            crashes.check(f"rank {rank} of {self.world_size}", code, errors)
        except crashes.Crash:
            self.close()
            raise
        return f"the process died: {crashes.cause(code)}\n{errors[-crashes.MAX_TEXT :]}"

    def _start(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            local, remote = socket.socketpair()
            arguments = [str(rank), str(self.world_size), str(self.store.port), *sys.path]  # to import the tests from
            with remote:
                program = [sys.executable, "-m", "tests.pool_worker", *arguments]
                self.errors.append(tempfile.TemporaryFile())  # noqa: SIM115  read when the rank dies
                self.workers.append(Forked(program, cwd=ROOT, stdin=remote, stderr=self.errors[-1]))
            self.pipes.append(Connection(local.detach()))


Ranks = Callable[[int], Pool]  # the fixture `ranks`


def user_error(function: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Returns the message of the UserError of a function, or "". A pool fails if its ranks raise."""
    try:
        function(*arguments, **named)
    except UserError as error:
        return str(error)
    return ""
