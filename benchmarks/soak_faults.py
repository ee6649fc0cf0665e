"""Faults that a run survives, injected into its processes from outside, and a store that can be slow or lost. Linux only."""

import contextlib
import random
import resource
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.launches import Start
from tests.stores.proxy import Proxy

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
FULL = 4096  # bytes, the largest size of a file on a disk that is full
UNLIMITED = resource.RLIM_INFINITY
# Of each quarter of a run; shorter runs are not compared, as allocators and the client of a store still grow.
MIN_SAMPLES = 15


class Store:
    """S3, emulated by moto, behind a proxy that can delay and refuse connections."""

    def __init__(self, port: int) -> None:
        import s3fs  # type: ignore[import-untyped]

        self.proxy = Proxy(port)
        self.files: Any = s3fs.S3FileSystem(
            key="nobody", secret="nothing", endpoint_url=f"http://127.0.0.1:{port}", use_listings_cache=False
        )
        self.files.mkdir("soak")
        self.variables = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}"}

    def copy(self, name: str, to: Path) -> None:
        """Copies the complete checkpoints of a run to an empty folder."""
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir(parents=True)
        for path in self.files.find(f"soak/{name}"):
            file = to / path.removeprefix(f"soak/{name}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(path, str(file))
        for folder in to.glob("step-*"):
            if not (folder / "manifest.json").exists():
                shutil.rmtree(folder)


@contextlib.contextmanager
def store() -> Iterator[Store]:
    """Runs the emulator."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    try:
        yield Store(moto.get_host_and_port()[1])
    finally:
        moto.stop()


def disturb(kind: str, start: Start, remote: Store | None, source: random.Random) -> None:
    """Disturbs a run for up to two seconds."""
    ranks, seconds = start.ranks(), source.uniform(0.2, 2.0)
    if kind == "paused rank":
        victims = [source.choice(ranks)] if ranks else []
        start.send(signal.SIGSTOP, victims)
        time.sleep(seconds)
        start.send(signal.SIGCONT, victims)
    elif kind == "full disk":
        _limit_files(ranks, FULL)
        before = _failed_saves(start)
        start.until(lambda: _failed_saves(start) >= before + 2, seconds)  # after the third one, a run stops
        _limit_files(ranks, UNLIMITED)
    elif kind == "slow store":
        assert remote
        remote.proxy.delay = 0.2
        time.sleep(seconds)
        remote.proxy.delay = 0.0
    else:
        assert remote
        assert kind == "lost store"
        remote.proxy.closed = True
        time.sleep(seconds)
        remote.proxy.closed = False


def _failed_saves(start: Start) -> int:
    return start.log_file.read_text(errors="replace").count("warning: saving the checkpoint of step ")


def _limit_files(ranks: list[int], size: int) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (size, UNLIMITED))


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    memory_mib: float
    threads: int
    files: int


def usage(process: int) -> Usage | None:
    """Returns what a process holds, or None if it has ended."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process)
        return Usage(found.memory_info().rss / 2**20, found.num_threads(), found.num_fds())
    return None


def growth(samples: dict[int, list[Usage]]) -> dict[str, dict[str, float]]:
    """Compares the second quarter of the samples of each process with the last: medians over processes, and the largest growth."""
    found = {}
    for name in ("memory_mib", "threads", "files"):
        pairs = []
        for process in samples.values():
            quarter = len(process) // 4
            if quarter >= MIN_SAMPLES:
                values = [getattr(sample, name) for sample in process]
                pairs.append((statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])))
        if pairs:
            found[name] = {
                "early": statistics.median(early for early, _ in pairs),
                "late": statistics.median(late for _, late in pairs),
                "largest_growth": max(late - early for early, late in pairs),
            }
    return found
