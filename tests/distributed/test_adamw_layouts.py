"""AdamW on sharded weights: updates that do not depend on the sharding, bitwise resume, checkpoints across layouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoints import assert_equal_state, assert_identical, drop_last, reshard
from tests.pool import Ranks
from tests.training import LLAMA, mesh_of, tiny, train
from titanlike.config.sections import Parallelism
from titanlike.models.llama.config import LlamaConfig
from titanlike.optim.low_precision_adamw import BLOCK, LowPrecisionAdamW, _random_bits
from titanlike.optim.optimizer import AdamW
from titanlike.recipe import PretrainRecipe

MODEL: Any = LlamaConfig(dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=256, vocab_size=320)
LOW: dict[str, Any] = dict(
    training=dict(steps=4, master_dtype="bfloat16", local_batch_size=2),
    optimizer=dict(state_dtype="8bit", stochastic_rounding=True, lr=1e-3),
    checkpoint=dict(interval=2),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": dict(shard=2),
    "TP": dict(tensor=2),
    "TP-FSDP": dict(tensor=2, shard=2),
    "PP": dict(pipeline=2),
}


def recipe_for(folder: Path, name: str, layout: str) -> PretrainRecipe:
    return tiny(folder, name, model=MODEL, parallelism=Parallelism(**LAYOUTS.get(layout, {})), **LOW)


def processes(layout: str) -> int:
    return 4 if layout == "TP-FSDP" else 1 if layout == "one" else 2


def _compare_sharded_update(placement: Any) -> tuple[bool, bool]:
    """Whether the random bits and the updates of a sharded weight equal those of the full weight."""
    mesh = mesh_of("cpu", shard=2).fsdp
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(6, 4 * BLOCK, generator=generator).bfloat16()
    gradient = torch.randn(full.shape, generator=generator).bfloat16()
    sharded, sharded_gradient = (distribute_tensor(x, mesh, [placement], src_data_rank=None) for x in (full, gradient))
    bits = _random_bits(full, 5, 0, full.numel()).view_as(full)
    local = distribute_tensor(bits, mesh, [placement], src_data_rank=None).to_local()
    same_bits = torch.equal(_random_bits(sharded, 5, 0, local.numel()).view_as(local), local)
    same_bits &= torch.equal(_random_bits(sharded, 5, BLOCK, BLOCK), local.flatten()[BLOCK : 2 * BLOCK])
    results = []
    for weight, weight_gradient in ((full, gradient), (sharded, sharded_gradient)):
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = LowPrecisionAdamW(
            [{"params": [parameter], "weight_decay": 0.1}],
            lr=1e-2, betas=(0.9, 0.95), eps=1e-8, state_dtype="8bit", seeds={parameter: 3},
        )  # fmt: skip
        for _ in range(3):
            parameter.grad = weight_gradient.clone()
            optimizer.step()
        results.append(
            [parameter, *(optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq", "exp_avg_sq_scale"))]
        )
    same = all(torch.equal(one, other.full_tensor()) for one, other in zip(*results, strict=True))
    return same_bits, same


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_low_precision_update_does_not_depend_on_the_sharding(ranks: Ranks, placement: Any) -> None:
    assert ranks(2).run(_compare_sharded_update, placement) == [(True, True)] * 2


def _sharded_updates(placement: Any, optimizer_class: type[torch.optim.AdamW]) -> list[torch.Tensor]:
    """Returns the full weight and moments after several steps."""
    mesh = mesh_of("cpu", shard=2).fsdp
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(
        distribute_tensor(torch.randn(6, 8, generator=generator), mesh, [placement], src_data_rank=None)
    )
    optimizer = optimizer_class([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(3):
        gradient = torch.randn(6, 8, generator=generator)
        parameter.grad = distribute_tensor(gradient, mesh, [placement], src_data_rank=None)
        optimizer.step()
    found = (parameter, *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")))
    return [tensor.full_tensor().detach() for tensor in found]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_adamw_on_local_shards_matches_dtensors(ranks: Ranks, placement: Any) -> None:
    found, expected = (ranks(2).run(_sharded_updates, placement, each) for each in (AdamW, torch.optim.AdamW))
    for rank, reference in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(rank, reference, strict=True))


@pytest.mark.parametrize("layout", ["FSDP", pytest.param("TP-FSDP", marks=pytest.mark.slow)])
def test_resume_is_bitwise_exact(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    recipe = recipe_for(tmp_path, "run", layout)
    found = train(ranks(processes(layout)), recipe)
    assert found.state["optimizer"]["layers.0.attention.wq.weight.exp_avg"].dtype == torch.uint8
    assert found.state["model"]["layers.0.attention.wq.weight"].dtype == torch.bfloat16
    drop_last(tmp_path / "run")
    assert_identical(train(ranks(processes(layout)), recipe), found)


@pytest.mark.slow
def test_checkpoints_load_under_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    for saver in ("TP-FSDP", "one"):
        recipe = recipe_for(tmp_path, f"by {saver}".replace(" ", "-"), saver)
        saved = train(ranks(processes(saver)), recipe).state
        for loader in LAYOUTS:
            other = replace(recipe, parallelism=Parallelism(**LAYOUTS[loader]))
            assert_equal_state(reshard(ranks(processes(loader)), recipe, other, tmp_path / f"{saver}-{loader}"), saved)


def test_model_widths_are_multiples_of_the_block_size() -> None:
    """Otherwise the tests above would not cover 8-bit state."""
    assert MODEL.dim % BLOCK == 0 and LLAMA.dim % BLOCK == 0
