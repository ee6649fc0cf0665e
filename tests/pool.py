"""Processes in one gloo group: a distributed test is a plain function that every rank runs."""

import pickle
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from tests.forkserver import ROOT, Forked


class Pool:
    """So many ranks, started at the first use and shared by the tests, until they have twice the threads of their first run.

    Process groups cannot be destroyed between runs, for caches of torch hold the meshes that refer to them, and with gloo each
    has three threads that poll: after many layouts, idle ranks would take the processor from those that work. Fresh processes
    cost a tenth of a second.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.workers: list[Forked] = []
        self.pipes: list[Any] = []
        self.threads: list[int] = []  # the most that a rank had after each run

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """What the function returns on each rank. If one fails, the others are ended, and its trace is raised."""
        if not self.workers:
            self._start()
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments, named)))
        results: dict[int, Any] = {}
        threads = [0]
        while len(results) < self.world_size:
            ready = wait([p for rank, p in enumerate(self.pipes) if rank not in results], timeout=300)
            assert ready, f"no rank of {self.world_size} answered in 300 s"
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    failed, results[rank], count = pickle.loads(pipe.recv_bytes())
                    threads.append(count)
                except EOFError:
                    failed, results[rank] = True, "the process died"
                if failed:
                    self.close()
                    raise AssertionError(f"rank {rank} of {self.world_size}: {results[rank]}")
        self.threads.append(max(threads))
        if self.threads[-1] > 2 * self.threads[0]:
            self.close()  # the next run starts fresh processes
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.kill()
            worker.wait()
        for pipe in self.pipes:
            pipe.close()
        self.workers, self.pipes, self.threads = [], [], []

    def _start(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            here, there = socket.socketpair()
            words = [str(rank), str(self.world_size), str(self.store.port), *sys.path]  # where tests are imported from
            with there:
                self.workers.append(Forked([sys.executable, "-m", "tests.pool_worker", *words], cwd=ROOT, stdin=there))
            self.pipes.append(Connection(here.detach()))
