"""Tensor parallelism with sequence parallelism, applied by a per-module plan.

Attention and feed-forward compute all tokens with a local shard of the heads or of the hidden dimension. Elsewhere activations are
sharded along the sequence. A model's plan maps each module name to one of `STYLES`.

Parameters are DTensors, so that FSDP, checkpoints and gradient norms know their layout. The forward pass uses plain tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titanlike.config import UserError
from titanlike.distributed.collectives import all_gather, reduce_scatter
from titanlike.models import blocks
from titanlike.parallelisms.param_override import override_params

SEQUENCE_DIM = 1  # of activations (B, T, D)
REPLICATED = Replicate()


@dataclass(frozen=True)
class Style:
    """The placements of a module's parameters, and the layouts of its input and output."""

    weight: Placement = REPLICATED
    bias: Placement = REPLICATED
    input_layout: Literal["any", "all_gather", "local_shard", "vocab_mask"] = "any"
    reduce_output: bool = False  # reduce-scatters partial outputs along the sequence


STYLES = {
    "colwise": Style(weight=Shard(0), bias=Shard(0)),
    "rowwise": Style(weight=Shard(1), reduce_output=True),
    "sequence_parallel": Style(),  # a norm: computes the local tokens
    "all_gather_input": Style(input_layout="all_gather"),  # a container whose first linear layers are colwise
    "vocab_parallel": Style(weight=Shard(0), input_layout="vocab_mask", reduce_output=True),
    "position_embedding": Style(input_layout="local_shard"),
    "lm_head": Style(weight=Shard(0), bias=Shard(0), input_layout="all_gather"),  # logits sharded along the vocabulary
}


def apply_tensor(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Shards the modules that the plan names over `mesh`. A `*` in a name matches a block's number."""
    if mesh.size() == 1:
        return
    cached_class: Any = cache(_tensor_parallel_class)  # blocks of the same classes share one compiled forward
    for name, module in model.named_modules():
        style_name = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style_name is not None:
            style = STYLES[style_name]
            for field, parameter in list(module.named_parameters(recurse=False)):
                placement = style.bias if field == "bias" else style.weight
                module.register_parameter(  # <- shards a parameter
                    field, nn.Parameter(distribute_tensor(parameter, mesh, [placement], src_data_rank=None))
                )
            module.__class__ = cached_class(type(module), style, mesh)
    # Local shards are read before each block runs, outside of compiled code, which then traces plain tensors only.
    for module in (*blocks(model).values(), *(m for name, m in model.named_children() if name != "layers")):
        sharded: list[Any] = [child for child in module.modules() if hasattr(child, "refresh_local_params")]
        if sharded:
            module.register_forward_pre_hook(partial(_refresh_local_params, sharded))
    unplanned = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if unplanned:
        raise UserError(
            f"the tensor-parallel plan of {type(model).__name__} does not name {unplanned[0].rpartition('.')[0]}; "
            f"add it with one of the styles {', '.join(STYLES)}"
        )

    def shard_dropout_bits(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bits = kwargs.get("dropout_bits")
        return args, kwargs if bits is None else kwargs | {"dropout_bits": _local_tokens(bits, mesh)}

    # Dropout is applied to activations that are sharded along the sequence.
    model.register_forward_pre_hook(shard_dropout_bits, with_kwargs=True)


def overlap_tensor(mesh: DeviceMesh) -> None:
    """Enables async tensor parallelism: the compiler splits each collective and overlaps it with matmuls."""
    if mesh.device_type != "cuda":
        raise UserError(
            "parallelism.async_tensor_parallel = true requires GPUs with peer-to-peer memory access, but the device is "
            f"{mesh.device_type}; set it false"
        )
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)
    torch._inductor.config._micro_pipeline_tp = True


def _tensor_parallel_class(module_class: Any, style: Style, mesh: DeviceMesh) -> type:
    """Returns a subclass that computes with local shards of its parameters."""
    rank, group = mesh.get_local_rank(), mesh.get_group()

    def get_local_param(module: Any, name: str) -> Tensor | None:
        # The bias of a reduced output is added once, after the reduction.
        return None if style.reduce_output and name == "bias" else module.local_params.get(name)

    class TensorParallel(override_params(module_class, ("weight", "bias"), get_local_param)):  # type: ignore[misc]
        local_params: dict[str, Tensor]  # kept after the forward pass for recomputation in the backward pass
        all_gather_input = staticmethod(all_gather)  # float8 replaces these two collectives
        reduce_scatter_output = staticmethod(reduce_scatter)

        def refresh_local_params(self) -> None:
            """Reads the local shards of the parameters."""
            self.local_params = {}
            for name, placement in (("weight", style.weight), ("bias", style.bias)):
                parameter = self.original_param(name)
                if isinstance(parameter, DTensor):
                    # A replicated parameter's local gradient covers the local tokens only.
                    gradient = Partial() if placement.is_replicate() else placement
                    self.local_params[name] = parameter.to_local(grad_placements=[gradient])

        def forward(self, x: Tensor, *others: Any) -> Tensor:
            in_vocab_shard = None
            if style.input_layout == "all_gather":
                x = self.all_gather_input(x, SEQUENCE_DIM, group)
            elif style.input_layout == "local_shard":
                x = _local_tokens(x, mesh)
            elif style.input_layout == "vocab_mask":
                rows = self.num_embeddings // mesh.size()
                in_vocab_shard = (x >= rank * rows) & (x < (rank + 1) * rows)
                x = (x - rank * rows).where(in_vocab_shard, 0)
            out: Tensor = super().forward(x, *others)
            if in_vocab_shard is not None:
                out = out.where(in_vocab_shard[..., None], 0.0)
            if style.reduce_output:
                out = self.reduce_scatter_output(out, SEQUENCE_DIM, group)
                out = out + self.local_params["bias"] if "bias" in self.local_params else out
            return out

    TensorParallel.style = style
    TensorParallel.__name__ = TensorParallel.__qualname__ = module_class.__name__
    return TensorParallel


def _refresh_local_params(modules: list[Any], *hook_args: object) -> None:
    for module in modules:
        module.refresh_local_params()


def _local_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return x.chunk(mesh.size(), SEQUENCE_DIM)[mesh.get_local_rank()]
