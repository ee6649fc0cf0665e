"""Object collectives, and the process groups of a mesh."""

import datetime
import math
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.crashes import Crash
from tests.fake_group import fake_process_group
from tests.launching import free_port, python
from tests.pool import Ranks
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint, Parallelism
from titanlike.distributed import environment, process_group
from titanlike.distributed.end_of_job import SEEN, announce_end
from titanlike.distributed.environment import RankInfo
from titanlike.parallelisms.mesh import build_mesh
from titanlike.recipe import PretrainRecipe
from titanlike.run.spares import without_spares


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        (dict(), 0),
        (dict(shard=4), 1),  # a group of one rank, shared by all dimensions of size 1
        (dict(replicate=2, shard=2), 3),
        (dict(shard=2, tensor=2), 3),
        (dict(shard=2, context=2), 2),
        (dict(pipeline=2, tensor=2), 3),
        (dict(pipeline=8, shard=8, tensor=8), 4),
        (dict(replicate=2, shard=32, context=2, tensor=4, expert=8), 7),
    ],
    ids=str,
)
def test_every_dimension_creates_one_group(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], count: int) -> None:
    """With NCCL, all ranks take part in a communicator split for each call, even for a group of others."""
    calls: list[list[int]] = []
    create = dist.distributed_c10d._new_process_group_helper
    monkeypatch.setattr(
        dist.distributed_c10d,
        "_new_process_group_helper",
        lambda *arguments, **named: calls.append(arguments[2]) or create(*arguments, **named),
    )
    world_size = math.prod(size for name, size in sizes.items() if name != "expert")
    rank = world_size - 1
    with fake_process_group(rank, world_size):
        calls.clear()  # of the group of all ranks
        build_mesh("cpu", **sizes)
    assert len(calls) == count
    assert all(rank in ranks for ranks in calls)


def test_a_rank_that_crashes_is_reported_with_its_stack(ranks: Ranks) -> None:
    with pytest.raises(Crash, match=r"(?s)rank 0 of 1: SIGABRT.*Fatal Python error: Aborted.*pool_worker"):
        ranks(1).run(os.abort)


def _timeouts() -> list[datetime.timedelta]:
    world = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    process_group._subgroups.clear()  # groups that other tests created
    built = build_mesh("cpu", replicate=2, tensor=2)
    copy = process_group.copy_of_world()
    groups = [*built.loss_groups, built.tensor.get_group(), built.pipeline.get_group(), built.context.get_group(), copy]
    return [world, *(group._get_backend(torch.device("cpu")).options._timeout for group in groups if group)]


def test_groups_have_the_timeout_of_the_job(ranks: Ranks) -> None:
    for world, *others in ranks(4).run(_timeouts):
        assert len(others) == 6
        assert set(others) == {world} != {datetime.timedelta(minutes=30)}


def test_nccl_connects_at_start_and_is_aborted_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that a process with a GPU makes, on a fake one."""
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(process_group, "select_device", lambda *_: torch.device("cuda", 3))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: calls.append((backend, options["device_id"]))
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(("destroy", None)))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append(("abort", None)))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: calls.append(("deterministic", mode)))
    monkeypatch.setattr(os, "environ", {})
    with process_group.session("cuda", deterministic=True):
        pass
    assert os.environ == {
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0", "TORCH_FR_BUFFER_SIZE": "2000",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }  # fmt: skip
    with pytest.raises(ZeroDivisionError), process_group.session("cuda"):
        raise ZeroDivisionError
    started = ("cpu:gloo,cuda:nccl", torch.device("cuda", 3))
    assert calls == [started, ("deterministic", True), ("destroy", None), started, ("abort", None)]


def test_processes_that_the_recipe_cannot_use_wait_for_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an elastic job with three nodes of two processes, of a recipe for four processes."""
    store, recipe = dist.HashStore(), PretrainRecipe(parallelism=Parallelism(shard=4))
    monkeypatch.setattr(dist, "rendezvous", lambda _, timeout: iter([(store, 0, 1)] if timeout.seconds == 120 else []))
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv(environment.SPARES, "0")
    ranks = [RankInfo(rank, 6, rank % 2, 2, started_by_launcher=True, is_elastic=True) for rank in range(6)]
    assert without_spares(recipe, ranks[3]) == replace(ranks[3], world_size=4)
    assert (os.environ["WORLD_SIZE"], environment.num_spares()) == ("4", 2)
    assert without_spares(replace(recipe, parallelism=Parallelism(shard=5)), ranks[5]) == ranks[5]
    assert without_spares(recipe, RankInfo(is_elastic=True)) == RankInfo(is_elastic=True)
    with pytest.raises(UserError, match=r"^checkpoint\.resume_from = 2, but a job whose number of nodes may change"):
        without_spares(replace(recipe, checkpoint=Checkpoint(resume_from=2)), ranks[0])
    with ThreadPoolExecutor() as threads:
        spares = [threads.submit(without_spares, recipe, rank) for rank in ranks[4:]]
        announce_end(store)  # waits for them
        assert store.add(SEEN, 0) == 2
    assert [getattr(each.exception(), "code", None) for each in spares] == [0, 0]
    monkeypatch.setattr(dist, "rendezvous", mock.Mock(side_effect=dist.DistNetworkError))
    with pytest.raises(SystemExit, match="143"):
        without_spares(recipe, ranks[5])
    assert capsys.readouterr().out == "spare   the recipe can use 2 of the 3 nodes; this one waits\n"  # once a node


OF_TORCH = {"store": "rendezvous", "rank": 2, "world_size": 5}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (RankInfo(), {"store": "in memory", "rank": 0, "world_size": 1}),
        (RankInfo(started_by_launcher=True, restart_count=1), {}),  # torch uses that of the launcher
        (RankInfo(started_by_launcher=True, launch_id="a"), {}),
        (
            RankInfo(started_by_launcher=True, launch_id="a", restart_count=1),
            OF_TORCH | {"store": ("restart-1", "rendezvous")},
        ),
        (RankInfo(started_by_launcher=True, is_elastic=True), OF_TORCH),
    ],
)
def test_each_start_has_a_store_of_its_own_and_the_timeout_of_the_recipe(
    ranks: RankInfo, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout, found = datetime.timedelta(seconds=7), {}
    monkeypatch.setattr(environment, "rank_info", lambda: ranks)
    monkeypatch.setattr(dist, "HashStore", lambda: "in memory")
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: (prefix, store))
    monkeypatch.setattr(
        dist, "rendezvous", lambda _, timeout: iter([("rendezvous", 2, 5)] if timeout.seconds == 7 else [])
    )
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: found.update(options))
    kept: Any = process_group._init_process_group(torch.device("cpu"), 7.0)
    assert found == expected | {"timeout": timeout}
    assert kept == ("rendezvous" if ranks.is_elastic else None)


def test_a_job_may_open_as_many_files_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1024, a common default, a few hundred ranks could not connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))
    )
    monkeypatch.setattr(dist, "barrier", lambda: None)
    limits: list[tuple[int, int]] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        with process_group.session("cpu"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == [(hard, hard)]


MISTAKE = """
import atexit, sys, time
from titanlike.config import UserError
from titanlike.distributed import process_group

atexit.register(print, "the interpreter finalizes", file=sys.stderr)
with process_group.session("cpu"):
    process_group.barrier()
    if process_group.is_main():
        raise UserError("a mistake")
    time.sleep(1)
"""


@pytest.mark.slow
def test_a_mistake_on_one_rank_ends_its_process_without_finalizing_the_interpreter(tmp_path: Path) -> None:
    """torch aborts a process whose interpreter finalizes while a thread of gloo releases a tensor, which is a matter of timing."""
    script = tmp_path / "mistake.py"
    script.write_text(MISTAKE)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor() as threads:
        places = [variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        first, _ = threads.map(lambda place: python(tmp_path, "mistake.py", variables=place), places)
    assert (first.returncode, first.stderr) == (2, "error: a mistake\n")
