"""Data-parallel options do not change results; test_parity.py covers the layouts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from tests.parity import COMPILED, Parity
from tests.pool import Ranks
from tests.training import MODELS, assert_same, full_tensor, mesh_of, tiny, train
from titanlike.config.sections import Parallelism
from titanlike.parallelisms.fsdp import _placement, accumulate_gradients, apply_fsdp


@pytest.mark.parametrize(
    ("reshard", "model"), [("never", "llama"), pytest.param("always", "gpt", marks=pytest.mark.slow)]
)
def test_resharding_matches_one_process(parity: Parity, tmp_path: Path, reshard: Any, model: str) -> None:
    parity(tiny(tmp_path, "run", model=MODELS[model], parallelism=dict(shard=4, reshard_after_forward=reshard)))


@pytest.mark.parametrize("processes", [1, 2])
def test_gradient_accumulation_matches_one_process(parity: Parity, tmp_path: Path, processes: int) -> None:
    """The baseline has a micro-batch of 8; these have 8 of 1 or, on two ranks, 2 of 2 and 1 of 4 each."""
    for local in {1: [1], 2: [2, 4]}[processes]:
        training = dict(local_batch_size=local)
        parity(tiny(tmp_path, f"local{local}", training=training, parallelism=dict(shard=processes)))


@pytest.mark.slow
def test_bfloat16_reduction_stays_near_float32(ranks: Ranks, parity: Parity, tmp_path: Path) -> None:
    found = train(ranks(2), tiny(tmp_path, "bfloat16", training=dict(reduce_dtype="bfloat16")))
    in_float32 = parity(tiny(tmp_path, "float32", parallelism=dict(shard=2)))
    assert_same(found, in_float32, loss=1e-3, norm=1e-2, weights=0.05)
    assert found.gradient_norms != in_float32.gradient_norms  # two float32 runs are bitwise equal


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
        pytest.param(2, 2, "each_microbatch", id="HSDP"),
        pytest.param(1, 2, "last_microbatch", id="FSDP-last"),
        pytest.param(2, 2, "last_microbatch", id="HSDP-last"),
    ],
)
@pytest.mark.parametrize("interruption", ["exception", "evaluation", "skip"])
def test_gradients_of_a_step_do_not_depend_on_the_step_before(
    ranks: Ranks, interruption: str, replicate: int, shard: int, gradient_sync: str
) -> None:
    for largest, error in ranks(replicate * shard).run(_gradients_after, interruption, replicate, shard, gradient_sync):
        assert error < 1e-5 * largest


def test_rows_of_stacks_are_sharded_where_their_matrices_are_too_few() -> None:
    """As Muon, which takes whole matrices of a stack, needs it."""
    for shape, expected in {(4, 8, 2): None, (3, 8, 2): Shard(1), (3, 6, 2): None, (3, 8): None}.items():
        assert _placement(nn.Parameter(torch.empty(shape, device="meta")), num_shards=4) == expected


SYNCED: dict[str, dict[str, Any]] = {
    "FSDP": dict(parallelism=Parallelism(shard=2)),
    "HSDP": dict(parallelism=Parallelism(replicate=2, shard=2)),
    "TP-FSDP": dict(parallelism=Parallelism(tensor=2, shard=2)),
    "CP-FSDP": dict(parallelism=Parallelism(context=2, shard=2)),
    "PP-FSDP": dict(parallelism=Parallelism(pipeline=2, shard=2)),
    "FSDP, compiled": dict(parallelism=Parallelism(shard=2), **COMPILED),
    # One step: later ones would amplify rounding differences, in bfloat16 and float8.
    "FSDP, float8": dict(
        parallelism=Parallelism(shard=2), training=dict(steps=1),
        float8=dict(scaling="tensorwise", layers=("*",), emulate=True, all_gather=True),
    ),
    "FSDP, bfloat16": dict(parallelism=Parallelism(shard=2), training=dict(compute_dtype="bfloat16", steps=1)),
    "FSDP, bfloat16 reduction": dict(
        parallelism=Parallelism(shard=2), training=dict(compute_dtype="bfloat16", reduce_dtype="bfloat16", steps=1)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "FSDP" else [pytest.mark.slow]) for name in SYNCED]
)
def test_last_microbatch_matches_each_microbatch(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Sums over micro-batches and over ranks are exchanged, so float32 rounds differently."""
    sections = SYNCED[layout]
    parallelism = sections["parallelism"]
    results = []
    for sync in ("each_microbatch", "last_microbatch"):
        changed = sections | dict(parallelism=replace(parallelism, gradient_sync=sync))
        results.append(train(ranks(math.prod(parallelism.dimensions().values())), tiny(tmp_path, sync, **changed)))
    each, last = results
    accumulates_in_bfloat16 = "reduction" in layout
    assert_same(last, each, **(dict(loss=1e-4, norm=1e-2, weights=0.05) if accumulates_in_bfloat16 else {}))
    if parallelism.pipeline > 1:  # its schedules reduce once per step under either setting
        assert last.gradient_norms == each.gradient_norms


def _accumulated(gradient_sync: Any) -> tuple[int, int]:
    """Returns the number of parameters of a model, and the bytes of gradients that a rank keeps between two micro-batches."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    apply_fsdp(model, mesh_of("cpu", shard=2).fsdp, units=[model[0]], compute_dtype=torch.bfloat16)
    for index, x in enumerate(accumulate_gradients(model, [torch.ones(2, 8)] * 3, gradient_sync)):
        if index == 2:
            break
        model(x).float().sum().backward()
    sizes = [cast(Any, p.grad).to_local().nbytes for p in model.parameters() if p.grad is not None]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for parameter in cast(Any, module._get_fsdp_state()._fsdp_param_group).fsdp_params:
                if parameter.unsharded_accumulated_grad is not None:
                    sizes.append(parameter.unsharded_accumulated_grad.nbytes)
    return num_parameters, sum(sizes)


@pytest.mark.parametrize(("gradient_sync", "shards"), [("each_microbatch", 2), ("last_microbatch", 1)])
def test_memory_of_accumulated_gradients(ranks: Ranks, gradient_sync: str, shards: int) -> None:
    for num_parameters, size in ranks(2).run(_accumulated, gradient_sync):
        assert size == 4 * num_parameters / shards  # in float32
