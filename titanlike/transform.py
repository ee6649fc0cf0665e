"""The one order of the transforms: a plain model on the meta device in, this rank's trainable model out."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config.sections import ActivationCheckpoint, Compile, Parallelism, Training
from titanlike.models import blocks
from titanlike.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanlike.parallelisms.compile import apply_compile
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import data_mesh


def transform(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> nn.Module:
    """Apply what the recipe asks for, in the order in which the parts need each other."""
    model.to(getattr(torch, training.master_dtype))
    layers = blocks(model)
    apply_activation_checkpoint(
        layers,
        mode=activation_checkpoint.mode,
        every_n=activation_checkpoint.every_n,
        memory_budget=activation_checkpoint.memory_budget,
    )
    # After checkpointing: the compiler sees what is recomputed and plans for it.
    apply_compile(model, layers, mode=compile.mode, backend=compile.backend)
    # Last: its hooks gather weights around a block, outside of what was compiled.
    apply_fsdp(
        model,
        data_mesh(mesh),
        units=[] if compile.mode == "model" else _units(model, layers),
        compute_dtype=getattr(torch, training.compute_dtype),
        reduce_dtype=getattr(torch, training.reduce_dtype),
        reshard_after_forward=parallelism.reshard_after_forward,
        cpu_offload=parallelism.cpu_offload,
    )
    return model


def _units(model: nn.Module, layers: nn.ModuleDict) -> list[nn.Module | list[nn.Module]]:
    """What FSDP gathers at once: a block, and each end of the model that has weights of its own.

    An embedding that is also the head stays with the root: it is used outside its own `forward`.
    """
    units: list[nn.Module | list[nn.Module]] = list(layers.values())
    if getattr(model, "output", None) is not None:
        units = [
            model.get_submodule("tok_embeddings"),
            *units,
            [model.get_submodule("norm"), model.get_submodule("output")],
        ]
    return units
