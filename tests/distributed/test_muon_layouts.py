"""Muon under every kind of layout: the update of sharded matrices is that of whole ones, bit for bit; a run resumes; the traffic is
that of the planner."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_group import fake_process_group
from tests.parity import MUON, parallelism_of
from tests.pool import Ranks
from tests.training import MODELS, build, full_tensor, tiny, world_size
from titanlike.checkpoint.staging import shard_range_of
from titanlike.config.optimizer import OptimizerGroup
from titanlike.config.sections import Parallelism
from titanlike.models.registry import build_model
from titanlike.optim.optimizer import build_optimizer
from titanlike.optim.schedule import set_learning_rate
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.recipe import PretrainRecipe
from titanlike.utils.dtensor import local_tensor

# Matrices that the ranks do not divide: the last shards are shorter, or empty.
ODD = dataclasses.replace(MODELS["llama"], num_layers=4, dim=60, num_heads=2, num_kv_heads=2, ffn_dim=92)
MODEL = dataclasses.replace(MODELS["llama"], num_layers=4)


def gradient(name: str, parameter: Tensor, step: int) -> Tensor:
    """Returns this rank's shard of a gradient that depends on the name and the step."""
    generator = torch.Generator().manual_seed(hash_of(name) + step)
    full = torch.randn(parameter.shape, generator=generator)
    shard = torch.zeros_like(parameter)
    where = shard_range_of(parameter)
    slices = tuple(slice(start, start + size) for start, size in zip(where.offset, where.shape, strict=True))
    local_tensor(shard).copy_(full[slices])
    return shard


def hash_of(name: str) -> int:
    return sum(ord(character) * 31**index for index, character in enumerate(name)) % 10**9


def update(recipe: PretrainRecipe) -> dict[str, Tensor]:
    """Returns the weights after three updates with given gradients, all-gathered, of the blocks of this rank."""
    model, _ = build(recipe)
    optimizer = build_optimizer(model, recipe.optimizer)
    for step in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(name, parameter, step)
        set_learning_rate(optimizer, 0.01 * (step + 1))
        optimizer.step()
    return {name: full_tensor(parameter) for name, parameter in model.named_parameters()}


def recipe_of(folder: Path, layout: dict[str, Any], **sections: Any) -> PretrainRecipe:
    sections["optimizer"] = MUON | sections.get("optimizer", {})
    return tiny(folder, "run", **({"model": MODEL} | sections), parallelism=parallelism_of(layout))


LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP of 3": dict(shard=3),
    "HSDP": dict(replicate=2, shard=2),
    "CP": dict(context=2),
    "TP x FSDP": dict(tensor=2, shard=2),
    "PP zbv x FSDP": dict(pipeline=2, pipeline_schedule="zbv", shard=2),
    "TP x HSDP": dict(tensor=2, replicate=2, shard=2),
}


@pytest.mark.parametrize(
    "name",
    [
        "FSDP of 3",
        "TP x FSDP",
        pytest.param("HSDP", marks=pytest.mark.slow),
        pytest.param("CP", marks=pytest.mark.slow),
        pytest.param("PP zbv x FSDP", marks=pytest.mark.slow),
        pytest.param("TP x HSDP", marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_one_process(ranks: Ranks, tmp_path: Path, name: str) -> None:
    recipe = recipe_of(tmp_path, LAYOUTS[name], model=ODD if name == "FSDP of 3" else MODEL)
    one = dataclasses.replace(recipe, parallelism=Parallelism(shard=1))
    (expected,) = ranks(1).run(update, one)
    results = ranks(world_size(recipe)).run(update, recipe)
    found: dict[str, Tensor] = {}
    for result in results:
        found |= result
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected)  # AdamW's kernel rounds the ends of odd shards otherwise
    matrices = [key for key, value in expected.items() if key.startswith("layers") and value.dim() == 2]
    assert len(matrices) == 28
    assert not [key for key in matrices if not torch.equal(found[key], expected[key])]


FIRST_BLOCK: dict[str, Any] = dict(groups=(OptimizerGroup(pattern="layers.0", optimizer="muon"),), muon_qk_clip=0.02)


def test_a_stage_without_matrices_takes_part_in_the_group_of_muon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL, all ranks take part in a communicator split for each new group: a rank that creates none would let the others
    wait."""
    calls: list[list[int]] = []
    create = dist.distributed_c10d._new_process_group_helper
    monkeypatch.setattr(
        dist.distributed_c10d,
        "_new_process_group_helper",
        lambda *arguments, **named: calls.append(arguments[2]) or create(*arguments, **named),
    )
    recipe = recipe_of(tmp_path, dict(pipeline=2, tensor=2, shard=2), optimizer=FIRST_BLOCK)
    created = []
    for rank in (1, 5):
        with fake_process_group(rank, 8):
            mesh = build_mesh("cpu", **recipe.parallelism.dimensions())
            with torch.device("meta"):
                model: Any = build_model(recipe.model)
            split = recipe.parallelism.split(recipe.model)
            model = parallelize(
                model, mesh, split=split, training=recipe.training, parallelism=recipe.parallelism, float8=recipe.float8,
                activation_checkpoint=recipe.activation_checkpoint, compile=recipe.compile,
            )  # fmt: skip
            calls.clear()
            optimizer: Any = build_optimizer(model, recipe.optimizer)
            created.append(([*calls], sum(len(group["params"]) for group in optimizer.optimizers[1].param_groups)))
    assert created == [([[0, 1, 2, 3]], 7), ([[4, 5, 6, 7]], 0)]


def _largest_logit(recipe: PretrainRecipe) -> float:
    model, _ = build(recipe)
    optimizer: Any = build_optimizer(model, recipe.optimizer)
    tokens = torch.arange(32)[None]
    model(tokens=tokens, labels=tokens).backward()
    optimizer.step()
    return float(optimizer.metrics["max_attention_logit"])


def test_the_largest_attention_logit_is_that_of_all_heads(ranks: Ranks, tmp_path: Path) -> None:
    one, two = (recipe_of(tmp_path, dict(tensor=size), optimizer=dict(muon_qk_clip=0.02)) for size in (1, 2))
    assert ranks(2).run(_largest_logit, two) == [pytest.approx(ranks(1).run(_largest_logit, one)[0])] * 2
