"""Rank heartbeats, used to identify a missing rank of several."""

import dataclasses
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from itertools import groupby
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from titanlike.distributed.process_group import connect_to_store

T = TypeVar("T")

MAX_LINES = 8  # of a diagnosis, for each kind of finding
RECONNECT_INTERVAL = 60.0  # seconds


@dataclasses.dataclass
class Heartbeat:
    """The state that a rank publishes."""

    step: int
    host: str
    pid: int
    ppid: int
    time: float = 0.0  # wall clock of its host
    paused: bool = True  # its current work may take longer than a step, as the first step that compiles
    location: str = ""  # of its training thread, once a hang is detected
    dumped: bool = False  # its stack traces are on disk
    finished: bool = False  # it has left the training loop

    @property
    def is_final(self) -> bool:
        """Whether no rank has to wait for another heartbeat."""
        return self.dumped or self.finished


class HeartbeatThread(threading.Thread):
    """Publishes a rank's heartbeat in the job's key-value store, and runs the watchdog's other store operations.

    A store operation may block forever if the host of the store is down. Callers therefore wait at most `timeout` seconds for its
    result.
    """

    def __init__(self, heartbeat: Heartbeat, rank: int, world_size: int, *, interval: float, timeout: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.heartbeat, self.rank, self.world_size = heartbeat, rank, world_size
        self.interval, self.timeout = interval, timeout
        self.is_alarm_raised = False
        self._run = 0
        self._last_changes: dict[int, tuple[Heartbeat | None, float]] = {}
        self._last_read = 0.0
        self._requests: queue.Queue[tuple[Callable[[Store], Any], futures.Future[Any]]] = queue.Queue()
        self._stop_event = threading.Event()

    def stop(self) -> None:
        """Publishes a last heartbeat and ends the thread."""
        self._stop_event.set()
        if self.is_alive():
            self._requests.put((lambda _: None, futures.Future()))
            self.join(self.timeout)

    def call(self, operation: Callable[[Store], T]) -> T | None:
        """Runs a store operation on the thread. Returns None if the store does not answer in time."""
        if not self.is_alive():
            return None
        result: futures.Future[T] = futures.Future()
        self._requests.put((operation, result))
        try:
            return result.result(self.timeout)
        except (futures.TimeoutError, RuntimeError):
            return None

    def run(self) -> None:
        """Publishes a heartbeat at every interval and before every operation."""
        store: Store | None = None
        is_last = False
        while not is_last:
            try:
                operation, result = self._requests.get(timeout=self.interval)
            except queue.Empty:
                operation, result = (lambda _: None), futures.Future()
            is_last = self._stop_event.is_set()
            try:
                store = store or self._connect()
                self.heartbeat.time = time.time()
                store.set(str(self.rank), json.dumps(dataclasses.asdict(self.heartbeat)))
                self.is_alarm_raised = store.check(["alarm"])
                result.set_result(operation(store))
            except RuntimeError as error:  # the connection is lost, perhaps with the host of the store
                store = None
                result.set_exception(error)
                is_last = self._stop_event.wait(RECONNECT_INTERVAL)

    def _connect(self) -> Store:
        store = connect_to_store()
        # A process may use several watchdogs, one after another. Every rank counts them alike, so the count names this one.
        self._run = self._run or store.add(f"watchdogs/{self.rank}", 1)
        return PrefixStore(f"watchdog/{self._run}", store)

    def read_all(self, store: Store, silence: float | None = None) -> tuple[dict[int, Heartbeat | None], list[int]]:
        """Store operation that returns the last heartbeat of every rank, and the ranks that are silent.

        A rank is silent if its heartbeat does not change for `silence` seconds, by default `timeout`, over a series of calls.
        """
        now = time.monotonic()
        if now - self._last_read > self.timeout:  # a new series, or this process was suspended
            self._last_changes = {}
        self._last_read = now
        keys = [str(rank) for rank in range(self.world_size)]
        present = keys if store.check(keys) else [key for key in keys if store.check([key])]
        contents = dict(zip(present, store.multi_get(present), strict=True))
        heartbeats: dict[int, Heartbeat | None] = {}
        silent = []
        for rank, key in enumerate(keys):
            heartbeat = Heartbeat(**json.loads(contents[key])) if key in contents else None
            heartbeats[rank] = heartbeat
            if rank not in self._last_changes or self._last_changes[rank][0] != heartbeat:
                self._last_changes[rank] = heartbeat, now
            if now - self._last_changes[rank][1] > (silence or self.timeout) and not (heartbeat and heartbeat.is_final):
                silent.append(rank)
        return heartbeats, silent

    def diagnose(self, *, is_reporter: bool) -> list[str]:
        """Returns which ranks are missing and where the others wait, once all live ranks have dumped their stacks."""
        found = self._wait_for_dumps() if is_reporter else None
        if found is None:
            return [
                "the job's key-value store does not answer: rank 0's process is stopped, or its host is down",
                f"rank {self.rank} waits in {self.heartbeat.location}",
            ]
        heartbeats, silent = found
        for rank in silent:
            heartbeat = heartbeats[rank]
            if heartbeat and (heartbeat.host, heartbeat.ppid) == (self.heartbeat.host, self.heartbeat.ppid):
                # The common launcher would wait half a minute for a stopped process. It has to see our exit code first.
                subprocess.Popen(["/bin/sh", "-c", f"sleep 3; kill -9 {heartbeat.pid}"], stderr=subprocess.DEVNULL)
        return diagnose_missing_ranks(heartbeats, silent, time.time())

    def _wait_for_dumps(self) -> tuple[dict[int, Heartbeat | None], list[int]] | None:
        """Returns the heartbeats and the silent ranks when all live ranks have dumped their stacks."""
        end = time.monotonic() + 4 * self.timeout
        while found := self.call(self.read_all):
            heartbeats, silent = found
            pending = [
                rank
                for rank, heartbeat in heartbeats.items()
                if rank not in silent and not (heartbeat and heartbeat.is_final)
            ]
            if not pending or time.monotonic() > end:
                break
            time.sleep(0.1)
        return found

    def wait_for_report(self) -> None:
        """Waits until another rank has reported the hang."""
        end = time.monotonic() + 8 * self.timeout
        is_reported: bool | None = False
        while is_reported is False and time.monotonic() < end:
            # None if the reporter hosted the store and has exited.
            is_reported = self.call(lambda store: store.check(["reported"]))
            time.sleep(0.1)


def diagnose_missing_ranks(
    heartbeats: Mapping[int, Heartbeat | None], silent: Collection[int], now: float
) -> list[str]:
    """Describes, from the last heartbeats, which ranks are missing and where the others wait."""
    lines = [_describe_silent(rank, heartbeats[rank], now) for rank in sorted(silent)[:MAX_LINES]]
    if len(silent) > MAX_LINES:
        lines.append(f"no heartbeat from {format_ranks(sorted(silent)[MAX_LINES:])} either")
    known = {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat and rank not in silent}
    finished = [rank for rank, heartbeat in known.items() if heartbeat.finished]
    if finished:
        step = min(known[rank].step for rank in finished)
        lines.append(f"{format_ranks(finished)} left the training loop at step {step}")
    alive = {rank: heartbeat for rank, heartbeat in known.items() if not heartbeat.finished}
    newest_step = max((heartbeat.step for heartbeat in alive.values()), default=0)
    behind = [(rank, heartbeat) for rank, heartbeat in alive.items() if heartbeat.step < newest_step]
    for rank, heartbeat in [] if silent else behind[:MAX_LINES]:
        name = f"rank {rank} (pid {heartbeat.pid} on {heartbeat.host})"
        lines.append(f"{name} is alive at step {heartbeat.step}; the others wait at step {newest_step}")
    if not lines:
        lines.append(f"all {len(alive)} ranks are alive at step {newest_step}")
    ranks_at: dict[str, list[int]] = {}
    for rank, heartbeat in alive.items():
        if heartbeat.location:
            ranks_at.setdefault(heartbeat.location, []).append(rank)
    for location, ranks in sorted(ranks_at.items(), key=lambda item: len(item[1]))[:MAX_LINES]:
        lines.append(f"{format_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {location}")
    return lines


def _describe_silent(rank: int, heartbeat: Heartbeat | None, now: float) -> str:
    if heartbeat is None:
        return f"rank {rank} has sent no heartbeat: its process is stopped, or its host is down"
    name, age = f"rank {rank} (pid {heartbeat.pid} on {heartbeat.host})", f"{now - heartbeat.time:.0f} s ago"
    cause = "its process is stopped, or its host is down"
    return f"{name} sent its last heartbeat {age} at step {heartbeat.step}: {cause}"


def format_ranks(ranks: Collection[int]) -> str:
    """Formats sorted ranks: "rank 3", "ranks 0-3, 5"."""
    spans = [[rank for _, rank in span] for _, span in groupby(enumerate(ranks), key=lambda item: item[1] - item[0])]
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
