"""The parameters that the planner computes are those of the model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training import GEMMA2, GEMMA3, GPT_, LLAMA, QWEN2, QWEN3, tiny
from titanlike.config.model_configs import TransformerConfig
from titanlike.config.sections import Lora, Parallelism
from titanlike.models import blocks, build_model
from titanlike.models.lora import apply_lora
from titanlike.planning.job import Job
from titanlike.planning.parameters import Parameter, fsdp_units, stage_of


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize(
    "model",
    [LLAMA, replace(LLAMA, tied_head=True), QWEN2, QWEN3, GEMMA2, GEMMA3, GPT_],
    ids=["llama", "tied", "qwen2", "qwen3", "gemma2", "gemma3", "gpt"],
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


def test_a_pipeline_has_a_copy_of_a_tied_head(tmp_path: Path) -> None:
    recipe = tiny(tmp_path, "run", model=replace(LLAMA, tied_head=True), parallelism=Parallelism(pipeline=2))
    job = Job(recipe, 2)
    last = stage_of(job, 1)
    assert "output.weight" in {parameter.name for parameter in last.last}
    assert [len(unit.parameters) for unit in fsdp_units(job, last)] == [9] * len(last.blocks) + [2]
