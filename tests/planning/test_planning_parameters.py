"""The parameters that the planner computes are those of the model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fake_group import fake_process_group
from tests.training import GEMMA2, GEMMA3, GPT_, LLAMA, MIXTRAL, OLMO2, QWEN2, QWEN3, QWEN3_MOE, tiny
from titanlike.config.finetune import Lora
from titanlike.config.sections import Parallelism
from titanlike.models.common.config import TransformerConfig
from titanlike.models.common.lora import apply_lora
from titanlike.models.moe.config import MoeConfig
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.parameters import Parameter, fsdp_units, stage_of
from titanlike.utils.dtensor import local_tensor


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize(
    "model",
    [LLAMA, replace(LLAMA, tied_head=True), QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, GEMMA2, GEMMA3, GPT_],
    ids=["llama", "tied", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3", "gpt"],
)
def test_names_shapes_and_gradients_are_those_of_the_model(tmp_path: Path, model: TransformerConfig, lora: int) -> None:
    recipe = tiny(tmp_path, "run", model=model, lora=dict(rank=lora, layers=("wq", "w2")))
    stage = stage_of(Job(recipe, 1), 0)
    found = {parameter.name: parameter for parameter in (*stage.first, *stage.last)}
    found |= {f"layers.{index}.{each.name}": each for index, block in stage.blocks.items() for each in block}
    with torch.device("meta"):
        module = build_model(model)
    if lora:
        apply_lora(module, blocks(module), Lora(rank=lora, layers=("wq", "w2")))
    expected = {name: (tuple(value.shape), value.requires_grad) for name, value in module.named_parameters()}
    assert {name: (each.shape, each.trainable) for name, each in found.items()} == expected
    if not lora:
        assert sum(each.size for each in stage.parameters) == model.num_parameters()


def test_padding_and_tensor_parallel_shards(tmp_path: Path) -> None:
    assert Parameter("w", (10, 3), True).padded(4) == 36
    recipe = tiny(tmp_path, "run", model=GPT_, parallelism=Parallelism(tensor=2))
    shapes = {parameter.name: parameter.shape for parameter in stage_of(Job(recipe, 2), 0).blocks[0]}
    assert shapes["attention.wq.weight"] == (32, 64) and shapes["attention.wq.bias"] == (32,)
    assert shapes["attention.wo.weight"] == (64, 32) and shapes["attention.wo.bias"] == (64,)
    recipe = tiny(tmp_path, "run", model=OLMO2, parallelism=Parallelism(tensor=2))
    shapes = {parameter.name: parameter.shape for parameter in stage_of(Job(recipe, 2), 0).blocks[0]}
    assert shapes["attention.q_norm.weight"] == (32,) and shapes["attention.k_norm.weight"] == (16,)


FEW = replace(QWEN3_MOE, num_experts=3)


# Eight ranks shard the vectors and matrices of 4 to 8 rows unevenly.
@pytest.mark.parametrize(
    ("model", "layout", "shape"),
    [
        (QWEN3_MOE, {}, (1, 48, 64)),
        (FEW, {}, (3, 6, 64)),  # along the second dimension
        (replace(FEW, ffn_dim=44), {}, (1, 44, 64)),  # padded
        (QWEN3_MOE, dict(expert=2), (1, 48, 64)),
        (QWEN3_MOE, dict(expert=8), (1, 48, 64)),
        (MIXTRAL, dict(expert=2), (2, 12, 64)),
        (MIXTRAL, dict(expert=2, context=2), (2, 12, 64)),
        (MIXTRAL, dict(expert=4, tensor=2), (1, 24, 64)),
        (MIXTRAL, dict(tensor=4), (2, 12, 64)),
        (MIXTRAL, dict(expert=2, replicate=4), (2, 48, 64)),
    ],
)
def test_shards_of_experts_are_those_of_the_model(
    tmp_path: Path, model: MoeConfig, layout: dict[str, int], shape: tuple[int, ...]
) -> None:
    recipe = tiny(tmp_path, "run", model=model, parallelism=Parallelism(**layout))
    job = Job(recipe, 8)
    planned = 0
    for unit in fsdp_units(job, stage_of(job, 0)):
        number = job.num_expert_shards if unit.experts else job.num_shards
        planned += sum(each.padded(number) // number for each in unit.parameters)
    with fake_process_group(0, 8):
        mesh = build_mesh("cpu", **job.layout.dimensions(), expert=job.layout.expert)
        with torch.device("meta"):
            module: torch.nn.Module = build_model(model)
        module = parallelize(
            module, mesh, split=job.split, training=recipe.training, parallelism=job.layout, float8=recipe.float8,
            activation_checkpoint=recipe.activation_checkpoint, compile=recipe.compile,
        )  # fmt: skip
        shards = {name: local_tensor(parameter) for name, parameter in module.named_parameters()}
    assert shards["layers.0.feed_forward.experts.w1"].shape == shape
    assert sum(shard.numel() for shard in shards.values()) == planned  # the first rank has the largest shards


def test_a_pipeline_has_a_copy_of_a_tied_head(tmp_path: Path) -> None:
    recipe = tiny(tmp_path, "run", model=replace(LLAMA, tied_head=True), parallelism=Parallelism(pipeline=2))
    job = Job(recipe, 2)
    last = stage_of(job, 1)
    assert "output.weight" in {parameter.name for parameter in last.last}
    assert [len(unit.parameters) for unit in fsdp_units(job, last)] == [9] * len(last.blocks) + [2]
