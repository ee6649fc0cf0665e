"""Data-parallel options do not change results; test_parity.py covers the layouts."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.parity import ALL_GATHER, COMPILED, DEFAULT, EVERY, SLOW, Tier, rows_of
from tests.pool import Ranks
from tests.training import assert_same, full_tensor, mesh_of, tiny, train, world_size
from titanlike.config.sections import Parallelism
from titanlike.parallelisms.fsdp import _placement, accumulate_gradients, apply_fsdp


def _gradients_after(interruption: str, replicate: int, shard: int, gradient_sync: Any) -> tuple[float, float]:
    """Returns the largest gradient of a step of 3 micro-batches after another step, and its error against one process.

    `interruption` is what happens in the step before: an exception after its second micro-batch, an evaluation between two steps,
    or a step that is skipped after its backward passes.
    """
    rank = torch.distributed.get_rank()
    data = torch.randn(4, 3, 2, 8, generator=torch.Generator().manual_seed(0))  # (rank, micro-batch, sequence, channel)

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    expected = build()
    for x in data[: replicate * shard].flatten(0, 1):
        expected(x).square().sum().backward()
    model = build()
    apply_fsdp(model, mesh_of("cpu", replicate=replicate, shard=shard).fsdp, units=[model[0]], gradient_reduction="sum")
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        try:
            for index, x in enumerate(accumulate_gradients(model, list(data[rank]), gradient_sync)):
                if step == 0 and interruption == "exception" and index == 2:
                    raise MemoryError
                model(x).square().sum().backward()
        except MemoryError:
            continue
        if step == 0 and interruption == "evaluation":
            with torch.no_grad():
                model(data[rank, 0])
    found = torch.cat([full_tensor(cast(Tensor, p.grad)).flatten() for p in model.parameters()])
    exact = torch.cat([cast(Tensor, p.grad).flatten() for p in expected.parameters()])
    return exact.abs().max().item(), (found - exact).abs().max().item()


@pytest.mark.parametrize(
    ("replicate", "shard", "gradient_sync"),
    [
        pytest.param(2, 1, "each_microbatch", id="DDP"),
        pytest.param(1, 2, "last_microbatch", id="FSDP-last"),
        pytest.param(2, 2, "last_microbatch", id="HSDP-last"),
    ],
)
def test_gradients_of_a_step_do_not_depend_on_the_step_before(
    ranks: Ranks, replicate: int, shard: int, gradient_sync: str
) -> None:
    for interruption in ("exception", "evaluation", "skip"):
        found = ranks(replicate * shard).run(_gradients_after, interruption, replicate, shard, gradient_sync)
        assert all(error < 1e-5 * largest for largest, error in found), interruption


def test_rows_of_stacks_are_sharded_where_their_matrices_are_too_few() -> None:
    """As Muon, which takes whole matrices of a stack, needs it."""
    for shape, expected in {(4, 8, 2): None, (3, 8, 2): Shard(1), (3, 6, 2): None, (3, 8): None}.items():
        assert _placement(nn.Parameter(torch.empty(shape, device="meta")), num_shards=4) == expected


# One step of the last ones: later ones would amplify rounding differences.
SYNCED: dict[str, tuple[Tier, dict[str, Any], dict[str, Any]]] = {
    "FSDP": (DEFAULT, dict(shard=2), {}),
    "HSDP": (SLOW, dict(replicate=2, shard=2), {}),
    "TP x FSDP": (EVERY, dict(tensor=2, shard=2), {}),
    "PP x FSDP": (SLOW, dict(pipeline=2, shard=2), {}),
    "FSDP, compiled": (EVERY, dict(shard=2), COMPILED),
    "FSDP, float8": (SLOW, dict(shard=2), dict(training=dict(steps=1), float8=ALL_GATHER)),
    "FSDP, bfloat16 reduction": (
        SLOW,
        dict(shard=2),
        dict(training=dict(compute_dtype="bfloat16", reduce_dtype="bfloat16", steps=1)),
    ),
}


@pytest.mark.parametrize(("layout", "sections"), rows_of(SYNCED))
def test_last_microbatch_matches_each_microbatch(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any], sections: dict[str, Any]
) -> None:
    """Sums over micro-batches and over ranks are exchanged, so float32 rounds differently."""
    sections = {"training": dict(steps=2)} | sections
    results = []
    for sync in ("each_microbatch", "last_microbatch"):
        recipe = tiny(tmp_path, sync, parallelism=Parallelism(gradient_sync=sync, **layout), **sections)
        results.append(train(ranks(world_size(recipe)), recipe))
    each, last = results
    accumulates_in_bfloat16 = "reduce_dtype" in sections["training"]
    assert_same(last, each, **(dict(loss=1e-4, norm=1e-2, weights=0.05) if accumulates_in_bfloat16 else {}))
    if "pipeline" in layout:  # its schedules reduce once per step under either setting
        assert last.gradient_norms == each.gradient_norms
