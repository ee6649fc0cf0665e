"""Object collectives, and the process groups of a mesh."""

import datetime
import math
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.forkserver import ROOT
from tests.launching import free_port
from tests.pool import Ranks, user_error
from tests.simulated_memory.fakes import fake_process_group
from tests.training import mesh_of
from titanlike.config import UserError
from titanlike.config.layout import DIMENSIONS
from titanlike.config.sections import Checkpoint, Parallelism
from titanlike.distributed import collectives, environment, process_group
from titanlike.distributed.end_of_job import SEEN, announce_end
from titanlike.distributed.environment import RankInfo
from titanlike.parallelisms.mesh import build_mesh
from titanlike.recipe import PretrainRecipe
from titanlike.run.spares import without_spares


def _run_collectives() -> tuple[int, list[int], float, str]:
    rank = dist.get_rank()
    process_group.assert_equal_across_ranks("the data", "equal")
    error_text = user_error(process_group.assert_equal_across_ranks, "the data", f"made by rank {rank}")
    total = collectives.all_reduce_sum(torch.tensor(1.5), [dist.group.WORLD]).item()
    return process_group.broadcast_object(rank + 7), process_group.all_gather_object(rank), total, error_text


def test_broadcast_gather_sum_and_equality_check(ranks: Ranks) -> None:
    for broadcast, gathered, total, error_text in ranks(2).run(_run_collectives):
        assert (broadcast, gathered, total) == (7, [0, 1], 3.0)
        assert error_text.startswith("the data differs across ranks: made by rank ")


def _coordinates(**sizes: int) -> tuple[int, int, tuple[int, ...], list[int], dict[str, list[int]]]:
    mesh = mesh_of("cpu", **sizes)
    groups = {
        name: dist.get_process_group_ranks(getattr(mesh, name).get_group())
        for name in ("pipeline", "context", "tensor")
    }
    tokens = collectives.all_reduce_sum(torch.tensor([2 ** dist.get_rank()]), mesh.loss_groups).item()
    summed = [rank for rank in range(dist.get_world_size()) if int(tokens) >> rank & 1]
    return mesh.data_rank, mesh.num_data_ranks, tuple(mesh.fsdp.shape), summed, groups


@pytest.mark.parametrize(
    ("sizes", "num_data_ranks", "weights"),
    [
        (dict(shard=4), [0, 1, 2, 3], (4,)),
        (dict(replicate=4), [0, 1, 2, 3], (4, 1)),
        (dict(replicate=2, shard=2), [0, 1, 2, 3], (2, 2)),
        # Ranks of a tensor, context or pipeline group read the same data. A context group also shards weights.
        (dict(shard=2, tensor=2), [0, 0, 1, 1], (2,)),
        (dict(shard=2, context=2), [0, 0, 1, 1], (4,)),
        (dict(replicate=2, context=2), [0, 0, 1, 1], (2, 2)),
        (dict(context=2, tensor=2), [0, 0, 0, 0], (2,)),
        (dict(pipeline=2, shard=2), [0, 1, 0, 1], (2,)),
    ],
    ids=str,
)
def test_mesh_groups_for_data_and_weights(
    ranks: Ranks, sizes: dict[str, int], num_data_ranks: list[int], weights: tuple[int, ...]
) -> None:
    found = ranks(4).run(_coordinates, **sizes)
    assert [rank for rank, _, _, _, _ in found] == num_data_ranks
    assert {(count, shape) for _, count, shape, _, _ in found} == {(max(num_data_ranks) + 1, weights)}
    grid = torch.arange(4).view([sizes.get(name, 1) for name in DIMENSIONS])
    for rank, (_, _, _, summed, groups) in enumerate(found):
        coordinates = [int(i) for i in (grid == rank).nonzero()[0]]
        for name, group in groups.items():
            indices = [
                slice(None) if name == dimension else i for dimension, i in zip(DIMENSIONS, coordinates, strict=True)
            ]
            assert group == grid[tuple(indices)].flatten().tolist()
        # The sum counts each token once: it includes ranks with other sequences or other chunks of them.
        assert summed == grid[coordinates[0], :, :, :, coordinates[4]].flatten().tolist()


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


def _groups_of_two_meshes() -> bool:
    first, second = (build_mesh("cpu", pipeline=pipeline, shard=2 // pipeline, tensor=2) for pipeline in (2, 1))
    return first.tensor.get_group() is second.tensor.get_group()


def test_two_meshes_in_one_process_share_groups_of_equal_ranks(ranks: Ranks) -> None:
    assert ranks(4).run(_groups_of_two_meshes) == [True] * 4


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


def _all_reduce_without_rank_0(partition: list[list[int]]) -> str:
    process_group._subgroups.pop(tuple(map(tuple, partition)), None)
    with mock.patch.object(process_group, "_timeout", lambda: datetime.timedelta(seconds=1)):
        group = process_group.subgroup(partition)
    found = ""
    if dist.get_rank() != 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            found = str(error)
    dist.barrier()
    process_group._subgroups.pop(tuple(map(tuple, partition)))
    return found


def test_collective_of_a_group_fails_if_a_peer_never_comes(ranks: Ranks) -> None:
    found = ranks(4).run(_all_reduce_without_rank_0, [[0, 1], [2, 3]])
    ranks(4).close()  # the group is broken
    assert "Timed out" in found[1] or "timed out" in found[1].lower()
    assert found[2] == found[3] == ""


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
import atexit, os, sys, time
import torch
import torch.distributed as dist
from titanlike.config import UserError
from titanlike.distributed import process_group

atexit.register(print, "the interpreter finalizes", file=sys.stderr)
sys.setswitchinterval(100)  # the threads of gloo wait for the interpreter lock, as on a busy machine
with process_group.session("cpu"):
    process_group.barrier()
    group = dist.group.WORLD  # outlives the session, as the groups of meshes do
    for _ in range(200):
        dist.all_reduce(torch.ones(1), async_op=True)
    if process_group.is_main():
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        raise UserError("a mistake")
    time.sleep(3)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_mistake_on_one_rank_does_not_abort_its_process(tmp_path: Path) -> None:
    """torch aborts a process whose interpreter finalizes while a thread of gloo releases a tensor, which is a matter of timing: the
    interpreter must not finalize."""
    script = tmp_path / "mistake.py"
    script.write_text(MISTAKE)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], stderr=subprocess.PIPE, text=True,
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    (_, errors), _ = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 0]
    assert errors == "error: a mistake\n"
