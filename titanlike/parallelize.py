"""The one order of the transforms: a plain model on the meta device in, this rank's trainable model out."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from titanlike.config.sections import ActivationCheckpoint, Compile, Float8, Parallelism, Training
from titanlike.models import blocks
from titanlike.models.layers import TiedHead
from titanlike.models.loss import chunked_linear_cross_entropy
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanlike.parallelisms.compile import apply_compile
from titanlike.parallelisms.context import apply_context
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelisms.pipeline import Pipeline
from titanlike.parallelisms.precision import apply_compute_dtype


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    split: Sequence[int],
    training: Training,
    parallelism: Parallelism,
    float8: Float8,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> nn.Module:
    """Apply what the recipe asks for, in the order in which the parts need each other.

    `split` has the number of blocks of each pipeline stage. The result is the model itself or, where there is more than one
    stage, the `Pipeline` that holds this rank's part of it.
    """
    plan = cast(Mapping[str, str], model.tensor_plan)
    compute_dtype = getattr(torch, training.compute_dtype)
    model.to(getattr(torch, training.master_dtype))
    in_float8 = float8.scaling != "none"
    if in_float8:
        # Only here: what is behind it takes two seconds to import.
        from titanlike.float8.all_gather import wrap_weights
        from titanlike.float8.linear import apply_float8, check_hardware
        from titanlike.float8.tensor_parallel import share_scales

        check_hardware(mesh.tensor.device_type, float8)
        apply_float8(model, float8)
    # Before all that shares: what is on another rank needs no transform.
    parts: list[Any] = [model]
    if mesh.pipeline.size() > 1:
        model = Pipeline(
            model,
            mesh.pipeline,
            schedule=parallelism.pipeline_schedule,
            split=split,
            dtype=compute_dtype,
            tensor=mesh.tensor.size(),
        )
        parts = list(model.parts.values())
    if mesh.tensor.size() > 1:
        from titanlike.parallelisms.tensor import apply_tensor, overlap_tensor

        for part in parts:
            apply_tensor(part, plan, mesh.tensor)
        if parallelism.async_tensor_parallel:
            overlap_tensor(mesh.tensor)
    if in_float8:
        for part in parts:
            share_scales(part, mesh.tensor.get_group(), mesh.context.get_group())
    layers = blocks(model)
    apply_context(layers, mesh.context)
    apply_activation_checkpoint(
        layers,
        mode=activation_checkpoint.mode,
        every_n=activation_checkpoint.every_n,
        memory_budget=activation_checkpoint.memory_budget,
    )
    for part in parts:
        if getattr(part, "output", None) is not None:
            part.output.loss = partial(
                chunked_linear_cross_entropy,
                chunk=training.loss_chunk,
                vocab_group=mesh.vocab_group,
                backend=compile.backend if compile.mode == "block" else "",
            )
    # After checkpointing: the compiler sees what is recomputed and plans for it.
    apply_compile(model, layers, mode=compile.mode, backend=compile.backend)
    reshard = parallelism.reshard_after_forward
    if reshard == "auto" and len(split) > 1:
        reshard = "never"  # every micro-batch would gather a stage's weights again
    # A rank that shares its weights with no other has nothing to gather.
    alone = mesh.fsdp.size() * mesh.tensor.size() == 1 and not (float8.all_gather or parallelism.cpu_offload)
    # Last: its hooks gather weights around a block, outside of what was compiled.
    for part in parts:
        if alone:
            apply_compute_dtype(part, compute_dtype)
            continue
        if float8.all_gather:
            wrap_weights(part)
        apply_fsdp(
            part,
            mesh.fsdp,
            units=[] if compile.mode == "model" else _units(part),
            compute_dtype=compute_dtype,
            reduce_dtype=getattr(torch, training.reduce_dtype),
            reshard_after_forward=reshard,
            cpu_offload=parallelism.cpu_offload,
        )
    return model


def _units(part: nn.Module) -> list[nn.Module | list[nn.Module]]:
    """What FSDP gathers at once: a block, and each end that is here.

    An embedding that is also the head stays with the root, and all that is not a block with it: it is used at both ends.
    """
    children = dict(part.named_children())
    layers = list(blocks(part).values())
    if isinstance(children.get("output"), TiedHead):
        return [*layers]
    first = [children[name] for name in ("tok_embeddings", "pos_embeddings") if name in children]
    last = [children[name] for name in ("norm", "output") if name in children]
    units: list[nn.Module | list[nn.Module]] = [first, *layers, last]
    return [unit for unit in units if unit != []]
