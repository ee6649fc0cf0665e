"""Processes that join one gloo group and stay: a distributed test is a plain function that every rank runs."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Pool:
    """So many ranks, started at the first use and shared by all tests that need as many."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.workers: list[Any] = []
        self.pipes: list[Any] = []

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """What the function returns on each rank. If one fails, the others are ended, and its trace is raised."""
        if not self.workers:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, arguments, named))
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            for pipe in wait([p for rank, p in enumerate(self.pipes) if rank not in results], timeout=300):
                rank = self.pipes.index(pipe)
                try:
                    failed, results[rank] = pipe.recv()
                except EOFError:
                    failed, results[rank] = True, "the process died"
                if failed:
                    self.close()
                    raise AssertionError(f"rank {rank} of {self.world_size}: {results[rank]}")
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.workers, self.pipes = [], []

    def _start(self) -> None:
        spawn = mp.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            here, there = spawn.Pipe()
            worker = spawn.Process(target=_serve, args=(there, rank, self.world_size, self.store.port), daemon=True)
            worker.start()
            self.workers.append(worker)
            self.pipes.append(here)


def _serve(pipe: Any, rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    while True:
        try:
            function, arguments, named = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(*arguments, **named)))
        except BaseException:  # noqa: BLE001  whatever it is, the test must see it
            pipe.send((True, traceback.format_exc()))
