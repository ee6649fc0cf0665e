"""The optimizer that takes less memory, under layouts: the same bits wherever a weight is cut, saved and resumed exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.test_checkpoint import drop_last, load_and_save_elsewhere
from tests.pool import Pool
from tests.training import LLAMA, mesh_of, tiny, train
from titanlike.checkpoint import read_whole
from titanlike.config import PretrainRecipe
from titanlike.config.model_configs import LlamaConfig
from titanlike.config.sections import Parallelism
from titanlike.optim.low_precision_adamw import BLOCK, LowPrecisionAdamW, _bits
from titanlike.optim.optimizer import AdamW

Ranks = Callable[[int], Pool]

SHAPE: Any = LlamaConfig(dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=256, vocab_size=320)
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
    return tiny(folder, name, model=SHAPE, parallelism=Parallelism(**LAYOUTS.get(layout, {})), **LOW)


def processes(layout: str) -> int:
    return 4 if layout == "TP-FSDP" else 1 if layout == "one" else 2


def _step_of_a_part(placement: Any) -> tuple[bool, bool]:
    """Whether rounding's bits, and what a step makes of a cut weight, are those of the whole weight."""
    mesh = mesh_of("cpu", shard=2).weights
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 4 * BLOCK, generator=generator).bfloat16()
    gradient = torch.randn(whole.shape, generator=generator).bfloat16()
    cut, cut_gradient = (distribute_tensor(x, mesh, [placement], src_data_rank=None) for x in (whole, gradient))
    bits = _bits(whole, 5, 0, whole.numel()).view_as(whole)
    mine = distribute_tensor(bits, mesh, [placement], src_data_rank=None).to_local()
    same_bits = torch.equal(_bits(cut, 5, 0, mine.numel()).view_as(mine), mine)
    same_bits &= torch.equal(_bits(cut, 5, BLOCK, BLOCK), mine.flatten()[BLOCK : 2 * BLOCK])
    ends = []
    for weight, its_gradient in ((whole, gradient), (cut, cut_gradient)):
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = LowPrecisionAdamW(
            [{"params": [parameter], "weight_decay": 0.1}],
            lr=1e-2, betas=(0.9, 0.95), eps=1e-8, state="8bit", seeds={parameter: 3},
        )  # fmt: skip
        for _ in range(3):
            parameter.grad = its_gradient.clone()
            optimizer.step()
        ends.append(
            [parameter, *(optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq", "exp_avg_sq_scale"))]
        )
    same = all(torch.equal(one, other.full_tensor()) for one, other in zip(*ends, strict=True))
    return same_bits, same


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_cut_weight_takes_the_steps_of_the_whole_one(ranks: Ranks, placement: Any) -> None:
    assert ranks(2).run(_step_of_a_part, placement) == [(True, True)] * 2


def _steps_of_a_part(placement: Any, kind: type[torch.optim.AdamW]) -> list[torch.Tensor]:
    """The weight and its moments after some steps, whole."""
    mesh = mesh_of("cpu", shard=2).weights
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(
        distribute_tensor(torch.randn(6, 8, generator=generator), mesh, [placement], src_data_rank=None)
    )
    optimizer = kind([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(3):
        gradient = torch.randn(6, 8, generator=generator)
        parameter.grad = distribute_tensor(gradient, mesh, [placement], src_data_rank=None)
        optimizer.step()
    found = (parameter, *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")))
    return [tensor.full_tensor().detach() for tensor in found]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_local_parts_take_the_steps_of_dtensors(ranks: Ranks, placement: Any) -> None:
    ours, theirs = (ranks(2).run(_steps_of_a_part, placement, kind) for kind in (AdamW, torch.optim.AdamW))
    for rank, expected in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(rank, expected, strict=True))


@pytest.mark.parametrize("layout", ["FSDP", pytest.param("TP-FSDP", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run_bit_for_bit(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    recipe = recipe_for(tmp_path, "run", layout)
    found = train(ranks(processes(layout)), recipe)
    assert found.state["optimizer"]["layers.0.attention.wq.weight.exp_avg"].dtype == torch.uint8
    assert found.state["model"]["layers.0.attention.wq.weight"].dtype == torch.bfloat16
    for _ in range(2):
        drop_last(tmp_path / "run")
        again = train(ranks(processes(layout)), recipe)
        assert (again.losses, again.gradient_norms) == (found.losses, found.gradient_norms)
        for kind, tensors in found.state.items():
            for name, value in tensors.items():
                assert torch.equal(value, again.state[kind][name]), name


@pytest.mark.slow
def test_what_one_layout_saves_every_other_loads(ranks: Ranks, tmp_path: Path) -> None:
    for saver in ("TP-FSDP", "one"):
        recipe = recipe_for(tmp_path, f"by {saver}".replace(" ", "-"), saver)
        saved = train(ranks(processes(saver)), recipe).state
        for loader in LAYOUTS:
            there = tmp_path / f"{saver}-{loader}" / "checkpoints"
            there.mkdir(parents=True)
            ranks(processes(loader)).run(load_and_save_elsewhere, _in(recipe, loader), there)
            moved = read_whole(there / "step-00000004")
            for kind, tensors in saved.items():
                assert moved[kind].keys() == tensors.keys()
                for name, value in tensors.items():
                    assert torch.equal(value, moved[kind][name]), f"{saver} to {loader}: {name}"


def _in(recipe: PretrainRecipe, layout: str) -> PretrainRecipe:
    from dataclasses import replace

    return replace(recipe, parallelism=Parallelism(**LAYOUTS[layout]))


def test_the_tiny_model_has_blocks() -> None:
    """Else the tests above would show nothing."""
    assert SHAPE.dim % BLOCK == 0 and LLAMA.dim % BLOCK == 0
