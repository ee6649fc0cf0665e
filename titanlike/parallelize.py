"""Applies all transforms to a model, in the one order that works.

The order is: float8, LoRA, pipeline split, tensor parallelism, expert parallelism, context parallelism, activation checkpointing,
compilation, FSDP.
The model is on the meta device throughout; `models.common.init.initialize` allocates the parameters of the result.
A transform is imported where the recipe asks for it: a run imports no other.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config.layout import SCHEDULES
from titanlike.config.sections import ActivationCheckpoint, Compile, Float8, Parallelism, Training
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.losses.own import LossFunction, OwnLoss, check_loss
from titanlike.losses.terms import BALANCE_LOSS, MTP_LOSS, Z_LOSS, LossTerms
from titanlike.models.common.document_mask import DocumentMask
from titanlike.models.common.layers import LMHead, TiedLMHead, set_loss
from titanlike.models.registry import blocks
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelisms.mixed_precision import apply_mixed_precision, cast_parameters
from titanlike.utils.modules import without_owner

if TYPE_CHECKING:
    from titanlike.config.finetune import Lora


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    split: Sequence[int],
    training: Training,
    parallelism: Parallelism,
    float8: Float8,
    lora: "Lora | None" = None,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    loss: LossFunction | None = None,
    loss_reduction: Literal["sum", "none"] = "sum",
    static_shapes: bool = False,
) -> nn.Module:
    """Applies the transforms that the recipe's sections ask for to a registered model on the meta device.

    Args:
        split: number of blocks of each pipeline stage.
        loss: replaces the cross-entropy in training; see docs/extending.md.
        loss_reduction: `none` makes the model return the cross-entropy of each token for labels, instead of the sum.
        static_shapes: see `apply_compile`; for one of two models of different sizes.

    Returns:
        The model or, with more than one pipeline stage, a `Pipeline` that holds this rank's stages.
    """
    compute_dtype = getattr(torch, training.compute_dtype)
    if loss is not None:
        set_loss(model, OwnLoss(loss))  # refuses a head that is not of the library
        check_loss(model, loss, training.z_loss, torch.device(mesh.tensor.device_type))
    use_float8 = float8.scaling != "none"
    if use_float8:
        # Imported here: torchao takes two seconds.
        from titanlike.float8.all_gather import wrap_weights
        from titanlike.float8.linear import apply_float8, check_hardware
        from titanlike.float8.tensor_parallel import share_scales

        check_hardware(mesh.tensor.device_type, float8)
        apply_float8(model, float8)
    if lora and lora.rank:
        from titanlike.models.common.lora import apply_lora

        apply_lora(model, blocks(model), lora)
    master_dtype = getattr(torch, training.master_dtype)
    # Nothing updates frozen weights: they need no other precision than the forward pass. Float8 all-gather casts from the master's.
    cast_parameters(model, master_dtype, frozen_dtype=master_dtype if float8.all_gather else compute_dtype)
    # Split before the rest: a module of another stage needs no further transform.
    parts: list[Any] = [model]
    if mesh.pipeline.size() > 1:
        from titanlike.parallelisms.pipeline import Pipeline

        model = Pipeline(
            model,
            mesh.pipeline,
            schedule=parallelism.pipeline_schedule,
            split=split,
            dtype=compute_dtype,
            tensor=mesh.tensor.size(),
        )
        parts = list(model.parts.values())
    terms = _loss_terms(parts, training)
    head_loss = CrossEntropy(
        chunk=training.loss_chunk,
        vocab_group=mesh.vocab_group,
        backend=compile.backend if compile.mode == "block" else "",
        retain_graph=mesh.pipeline.size() > 1 and SCHEDULES[parallelism.pipeline_schedule].splits_backward,
        z_loss=training.z_loss,
        reduction=loss_reduction,
        terms=terms,
    )
    if loss is not None:
        head_loss = OwnLoss(loss, **vars(head_loss))
    for part in parts:
        if isinstance(getattr(part, "output", None), LMHead | TiedLMHead):
            set_loss(part, head_loss)
    if mesh.tensor.size() > 1:
        from titanlike.parallelisms.tensor import apply_tensor
        from titanlike.parallelisms.tensor_overlap import overlap_tensor

        for part in parts:
            apply_tensor(part, part.tensor_plan, mesh.tensor, blocks=blocks(part), replicated_io=False)
            if parallelism.async_tensor_parallel:
                overlap_tensor(part, mesh.tensor)
    inner_units: dict[nn.Module, DeviceMesh] = {}
    if mesh.expert is not None and mesh.expert_fsdp is not None:
        from titanlike.models.common.experts import routers
        from titanlike.parallelisms.expert import apply_expert

        # A stage of the first blocks may have none.
        for part in [part for part in parts if mesh.pipeline.size() == 1 or any(routers(part))]:
            inner_units |= dict.fromkeys(apply_expert(part, mesh.expert), mesh.expert_fsdp)
    if use_float8:
        for part in parts:
            share_scales(
                part, mesh.tensor.get_group(), mesh.context.get_group(), overlap=parallelism.async_tensor_parallel
            )
    layers = blocks(model)
    for part in parts:
        for module in part.modules():
            if isinstance(module, DocumentMask) and training.attention != "auto":
                module.use_dense_masks()
    if mesh.context.size() > 1:
        from titanlike.parallelisms.context import apply_context

        for part in parts:
            apply_context(blocks(part), mesh.context, model=part)

    def compile_blocks() -> None:
        from titanlike.parallelisms.compile import apply_compile

        apply_compile(layers, backend=compile.backend, fullgraph=not inner_units, static_shapes=static_shapes)

    compile_last = compile.mode == "block"
    if inner_units and compile_last and activation_checkpoint.mode != "selective":
        # The experts are not compiled. A compiled checkpoint would run all of such a block eagerly: the compiler works inside of
        # it. Selective checkpointing recomputes the parts of such a block one by one, and the experts are a part.
        compile_blocks()
        compile_last = False
    if activation_checkpoint.mode != "none":
        from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint

        apply_activation_checkpoint(
            layers,
            mode=activation_checkpoint.mode,
            memory_budget=activation_checkpoint.memory_budget,
            preserve_rng_state=False,  # dropout is a function of its inputs, and saving a state synchronizes with the GPU
        )
    # After activation checkpointing, so that the compiler sees what is recomputed and plans for it.
    if compile_last:
        compile_blocks()
    if activation_checkpoint.offload:
        from titanlike.parallelisms.activation_offload import apply_activation_offload

        apply_activation_offload(layers)
    reshard = parallelism.reshard_after_forward
    if reshard == "auto" and len(split) > 1:
        reshard = "never"  # every micro-batch would all-gather a stage's weights again
    # Last, so that FSDP's hooks all-gather the weights outside of the compiled code. On one rank it would only copy them.
    if mesh.fsdp.size() * mesh.tensor.size() == 1 and not (float8.all_gather or parallelism.cpu_offload):
        for part in parts:
            apply_mixed_precision(part, compute_dtype, cast_forward_inputs=False)
    else:
        from titanlike.parallelisms.fsdp import apply_fsdp

        for part in parts:
            if float8.all_gather:
                wrap_weights(part)
            apply_fsdp(
                part,
                mesh.fsdp,
                units=fsdp_units(part),
                gradient_reduction="sum",  # the loss is already divided by the number of tokens in the global batch
                cast_forward_inputs=False,  # activations take the weights' dtype, and rotary angles must stay in float32
                compute_dtype=compute_dtype,
                reduce_dtype=getattr(torch, training.reduce_dtype),
                reshard_after_forward=reshard,
                cpu_offload=parallelism.cpu_offload,
                inner_units=inner_units,
            )
    if mesh.pipeline.size() > 1:
        cast(Any, model).register_parts()
    cast(Any, model).loss_terms = terms
    # Compiled blocks without recomputation keep each weight that they cast.
    cast(Any, model).casts_once = compile.mode == "block" and activation_checkpoint.mode == "none"
    cast(Any, model).gradient_sync = parallelism.gradient_sync  # of `forward_backward`
    return model


def _loss_terms(parts: Sequence[Any], training: Training) -> LossTerms | None:
    """Returns what the model adds those terms of its loss to that have metrics of their own, or None if there are none."""
    balance_losses = [part.balance_loss for part in parts if getattr(part, "balance_loss", None) is not None]
    has_mtp = getattr(getattr(parts[0], "config", None), "num_mtp_layers", 0) > 0
    if not (training.z_loss or balance_losses or has_mtp):
        return None
    present = {Z_LOSS: training.z_loss > 0, BALANCE_LOSS: bool(balance_losses), MTP_LOSS: has_mtp}
    terms = LossTerms([name for name, is_present in present.items() if is_present])
    for one in balance_losses:
        one.terms = terms
    return terms


def fsdp_units(part: nn.Module) -> list[nn.Module | list[nn.Module]]:
    """Returns the modules that FSDP all-gathers together: each block, the embeddings, and the norm with the LM head.

    With a tied LM head, everything but the blocks stays with the root: the embedding is used at both ends.
    """
    children = dict(part.named_children())
    layers = list(blocks(part).values())
    output = children.get("output")
    if output is not None and isinstance(without_owner(output), TiedLMHead):
        return [*layers]
    first, last = (
        [children[name] for name in names if name in children]
        for names in cast(Any, (part.first_stage_modules, part.last_stage_modules))
    )
    units: list[nn.Module | list[nn.Module]] = [first, *layers, last]
    return [unit for unit in units if unit != []]
