"""Fixtures that many tests share."""

import os

# Before torch reads it, and for all processes that are started: tiny models gain nothing from threads, and where there are more
# threads than cores some steps take a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from tests.pool import Pool

# What a run keeps for later ones, such as tokens of text: not where the user has it. Processes that are started inherit it.
_CACHE = tempfile.TemporaryDirectory(prefix="titanlike-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", help="write what the parity tests measure to this JSON file")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """`ranks(4)` is a pool of four processes in one gloo group, kept for the whole session."""
    pools: dict[int, Pool] = {}
    yield lambda world_size: pools.setdefault(world_size, Pool(world_size))
    threads = {size: pool.threads for size, pool in pools.items()}
    for pool in pools.values():
        pool.close()
    for size, counts in threads.items():
        assert not counts or counts[-1] <= 2 * counts[0], f"threads of a rank of {size} from run to run: {counts}"


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
