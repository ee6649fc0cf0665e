"""Shared fixtures and options."""

import os

# Set before torch is imported, and inherited by child processes. Tiny models do not benefit from threads, and with more threads
# than cores some steps take a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that crashes prints the Python stack of each thread.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
# A module is compiled once, not by each interpreter that a test starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import atexit
import gc
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.register_assert_rewrite("tests")  # failures in modules that several test files share show what differs

from tests import crashes
from tests.changed import ROOT, changed_files, near_tests
from tests.costs import Costs
from tests.durability import disk as disk
from tests.forkserver import NUM_SYNTHETIC_TOKENS
from tests.launching import Cli, Printed, run_forked

sys.dont_write_bytecode = False
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup too, runs of tests stop as they do without it
crashes.check_all_processes()

# The cache of runs, such as the tokens of text, is not the user's. Child processes inherit the variable.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="titanlike-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", help="write what the parity tests measure to this JSON file")
    parser.addoption(
        "--changed", action="store_true", help="run the tests near what differs from HEAD (tests/changed.py)"
    )
    parser.addoption("--costs", help="write the CPU seconds of each file to this JSON file")
    parser.addoption("--cpu-budget", type=float, help="fail if the tests take more CPU seconds (tests/costs.py)")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.option.changed:
        config.option.changed = near_tests(changed_files())  # workers get the list


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("costs") or config.getoption("cpu_budget"):
        config.pluginmanager.register(Costs(config))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Runs up to three files in this process: workers would take longer to start than most files take."""
    files = config.option.changed or [word.partition("::")[0] for word in config.args]
    return 0 if len(files) <= 3 and all(file.endswith(".py") for file in files) else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Excludes the files that are far from the change."""
    if config.option.changed and collection_path.suffix == ".py":
        return str(collection_path.relative_to(ROOT)) not in config.option.changed
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves tests that take minutes, and those nearest to a change, to the front."""
    near = items[0].config.option.changed if items else []
    items.sort(key=lambda item: item.get_closest_marker("minutes") is None)
    items.sort(key=lambda item: near.index(item.nodeid.partition("::")[0]) if near else 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Has one worker run the tests that share what a module keeps, and one worker all tests of ranks, which share pools and the
    runs of one process that they compare with. `--dist=loadgroup` has no effect with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    @cache
    def group(file: str) -> str:
        text = (ROOT / file).read_text()
        if re.search(r"\b(ranks: Ranks|parity: Parity)\b", text):
            return "ranks"
        return file if 'scope="module"' in text or "@functools.cache" in text else ""

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid.partition("::")[0]) or nodeid

    config.option.loadscopereorder = False  # keeps the order of pytest_collection_modifyitems
    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Excludes all that was imported from later garbage collections, which a run in this process does twice."""
    if "torch" in sys.modules:
        _draw_few_tokens()
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _draw_few_tokens() -> None:
    """Has synthetic data as small as in the processes that the fork server starts."""
    from titanlike.data.tokens import datasets

    datasets.SYNTHETIC_TOKENS = NUM_SYNTHETIC_TOKENS


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Any]]:
    """Returns a function: `ranks(4)` is a pool of four processes in one gloo group, kept for the session."""
    from tests.pool import Pool

    if "PYTEST_XDIST_WORKER" in os.environ:
        (tmp_path_factory.getbasetemp().parent / "ranks").mkdir()  # fails if another worker has pools
    pools: dict[int, Pool] = {}
    yield lambda world_size: pools.setdefault(world_size, Pool(world_size))
    threads = {size: pool.threads for size, pool in pools.items()}
    for pool in pools.values():
        pool.close()
    for size, counts in threads.items():
        assert not counts or counts[-1] <= 2 * counts[0], f"threads per rank of {size} after each run: {counts}"


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group with this process only."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Returns a function: `program(main, "--option", code=2)` runs a program in this process, whose exit code has to be 2."""

    def run(main: Callable[[], None], *words: object, code: int = 0) -> Printed:
        capsys.readouterr()  # what the test has printed before
        found: object = 0
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["titanlike", *map(str, words)])
            patched.setattr("signal.signal", lambda *_: None)  # keeps pytest's own handler
            try:
                main()
            except SystemExit as end:
                found = end.code or 0
        printed = Printed(*capsys.readouterr())
        assert found == code, printed.err
        return printed

    return run


@pytest.fixture
def cli(program: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Returns a function: `cli("plan", recipe, code=2)` runs `titanlike plan recipe` in this process, with 2 as its exit code."""
    from titanlike.tools import programs
    from titanlike.tools.cli.main import main

    _draw_few_tokens()
    monkeypatch.setattr(programs, "subprocess", SimpleNamespace(run=run_forked))  # a recipe's program
    return partial(program, main)
