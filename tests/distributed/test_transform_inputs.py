"""What the transforms get: the options of a recipe, and the dtypes that blocks and stages compute with in mixed precision."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.pool import Pool
from tests.training import DEEPSEEK_V3, GEMMA3, GPT_OSS, LLAMA, MODERNBERT, QWEN3_MOE, build, tiny
from titanlike.config.sections import Parallelism
from titanlike.data.batches.loader import Batch
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.models.common.document_mask import DocumentMask
from titanlike.models.registry import blocks
from titanlike.parallelisms import activation_checkpoint, activation_offload, fsdp
from titanlike.parallelisms import compile as compilation
from titanlike.utils.modules import without_owner

Ranks = Callable[[int], Pool]
TRANSFORMS: tuple[Callable[..., Any], ...] = (
    fsdp.apply_fsdp, compilation.apply_compile, activation_checkpoint.apply_activation_checkpoint,
    activation_offload.apply_activation_offload,
)  # fmt: skip


def test_options_of_a_recipe_reach_the_transforms(ranks: Ranks) -> None:
    expected = {
        "apply_fsdp": dict(
            gradient_reduction="sum", cast_forward_inputs=False, compute_dtype=torch.float16, reduce_dtype=torch.bfloat16,
            reshard_after_forward="always", cpu_offload=False, inner_units={},
        ),
        "apply_compile": dict(backend="aot_eager", fullgraph=True, static_shapes=False),
        "apply_activation_checkpoint": dict(mode="selective", memory_budget=0.3, preserve_rng_state=False),
        "apply_activation_offload": {},
        "loss": CrossEntropy(chunk=16, z_loss=0.1, backend="aot_eager"),
        "masks": {False},
    }  # fmt: skip
    for found in ranks(2).run(_options):
        assert found == expected


def _options() -> dict[str, Any]:
    training: Any = dict(compute_dtype="float16", reduce_dtype="bfloat16", loss_chunk=16, z_loss=0.1, attention="math")
    checkpointing = dict(mode="selective", memory_budget=0.3, offload=True)
    layout = Parallelism(shard=1, context=2, reshard_after_forward="always")
    compiled = dict(mode="block", backend="aot_eager")
    recipe = tiny(
        Path(), "", training=training, activation_checkpoint=checkpointing, parallelism=layout, compile=compiled
    )
    with ExitStack() as patches:
        spies = {
            one.__name__: patches.enter_context(mock.patch(f"{one.__module__}.{one.__name__}", wraps=one))
            for one in TRANSFORMS
        }
        model, _ = build(recipe)
    found = {name: {**spy.call_args.kwargs} for name, spy in spies.items()}
    del found["apply_fsdp"]["units"]
    head: Any = without_owner(model.get_submodule("output"))
    masks = {module.flex for module in model.modules() if isinstance(module, DocumentMask)}
    return found | {"loss": dataclasses.replace(head.loss, terms=None), "masks": masks}


ROTARY = (LLAMA, GEMMA3, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS, MODERNBERT)


@pytest.mark.parametrize("processes", [1, 2], ids=["one process", "FSDP"])
def test_blocks_in_bfloat16_get_rotary_angles_in_float32(ranks: Ranks, processes: int) -> None:
    for found in ranks(processes).run(_block_inputs):
        assert found == {
            config.name: {(torch.bfloat16, torch.float32, torch.float32), (torch.bfloat16,)} for config in ROTARY
        }


@torch.no_grad()
def _block_inputs() -> dict[str, set[tuple[torch.dtype, ...]]]:
    """Returns the dtypes of what blocks get, which are hidden states, cosines and sines, and of logits."""
    found: dict[str, set[tuple[torch.dtype, ...]]] = {}
    for config in ROTARY:
        model, _ = build(tiny(Path(), "", model=config, training=dict(compute_dtype="bfloat16")))
        of_model = found[config.name] = set()
        for block in blocks(model).values():
            block.register_forward_pre_hook(lambda _, inputs, of_model=of_model: of_model.add(_dtypes_in(inputs)))
        of_model.add(_dtypes_in(model(torch.zeros(1, 8, dtype=torch.long))))
    return found


def _dtypes_in(inputs: Any) -> tuple[torch.dtype, ...]:
    return tuple(x.dtype for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point())


def test_stages_in_bfloat16_get_counts_of_experts_in_float32(ranks: Ranks) -> None:
    assert ranks(2).run(_stage_inputs) == [{()}, {(torch.bfloat16, torch.float32)}]


def _stage_inputs() -> set[tuple[torch.dtype, ...]]:
    recipe = tiny(
        Path(), "", model=QWEN3_MOE, parallelism=Parallelism(pipeline=2), training=dict(compute_dtype="bfloat16")
    )
    model: Any = build(recipe)[0]
    found: set[tuple[torch.dtype, ...]] = set()
    [part] = model.parts.values()
    part.register_forward_pre_hook(lambda _, *inputs: found.add(_dtypes_in(inputs)), with_kwargs=True)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    batch = Batch({"tokens": tokens, "position_ids": torch.arange(8)[None]}, tokens)
    model.forward_backward([batch] * 2, lambda loss: loss)
    return found
