"""Agreeing over the process group."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from titanlike import distributed
from titanlike.config import UserError
from titanlike.parallelisms.mesh import DIMENSIONS, build_mesh, data_coordinate, data_mesh

Ranks = Callable[[int], Pool]


def _talk() -> tuple[int, list[int], float, str]:
    rank = dist.get_rank()
    distributed.same_everywhere("the data", "equal")
    try:
        distributed.same_everywhere("the data", f"made by rank {rank}")
        said = ""
    except UserError as error:
        said = str(error)
    return distributed.agree(rank + 7), distributed.gather(rank), distributed.sum_over(torch.tensor(1.5)).item(), said


def test_ranks_agree_gather_add_and_notice_a_difference(ranks: Ranks) -> None:
    for agreed, gathered, added, said in ranks(2).run(_talk):
        assert (agreed, gathered, added) == (7, [0, 1], 3.0)
        assert said.startswith("the data is not the same on all ranks: made by rank ")


def _coordinates(**sizes: int) -> tuple[tuple[int, int], tuple[str, ...], tuple[str, ...]]:
    mesh = build_mesh("cpu", **sizes)
    return data_coordinate(mesh), mesh.mesh_dim_names or (), data_mesh(mesh).mesh_dim_names or ()


@pytest.mark.parametrize(
    ("sizes", "data_ranks", "dimensions"),
    [
        (dict(shard=4), [0, 1, 2, 3], ("shard",)),
        (dict(replicate=4), [0, 1, 2, 3], ("replicate", "shard")),
        (dict(replicate=2, shard=2), [0, 1, 2, 3], ("replicate", "shard")),
        # Room for what is to come: ranks of one tensor, context or pipeline group read the same data.
        (dict(shard=2, tensor=2), [0, 0, 1, 1], ("shard",)),
        (dict(shard=2, context=2), [0, 0, 1, 1], ("shard",)),
        (dict(pipeline=2, shard=2), [0, 1, 0, 1], ("shard",)),
    ],
    ids=str,
)
def test_the_mesh_names_who_reads_what(
    ranks: Ranks, sizes: dict[str, int], data_ranks: list[int], dimensions: tuple[str, ...]
) -> None:
    found = ranks(4).run(_coordinates, **sizes)
    assert [coordinate for (coordinate, _), _, _ in found] == data_ranks
    assert {count for (_, count), _, _ in found} == {max(data_ranks) + 1}
    assert found[0][1] == DIMENSIONS
    assert found[0][2] == dimensions
