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


_POOLS: dict[int, Pool] = {}


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], Pool]:
    """`ranks(4)` is a pool of four processes in one gloo group. A test has fresh ones."""
    return lambda world_size: _POOLS.setdefault(world_size, Pool(world_size))


@pytest.fixture(autouse=True)
def _pools_end_with_the_test() -> Iterator[None]:
    yield
    threads = [pool.threads for pool in _POOLS.values() if pool.threads]
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()
    assert all(counts[-1] <= 2 * counts[0] for counts in threads), f"threads of ranks grow from run to run: {threads}"


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
