"""Tensor parallelism: each matrix, and the stream between the matrices, is shared by a group of ranks.

Inside attention and feed-forward each rank has all tokens, and a share of the heads or of the hidden layer; elsewhere it has a
share of the tokens and all of their width (sequence parallelism). A model says in its plan, by name, which part is what.

The parameters are DTensors, so that what shards, saves and counts them knows their layout. The arithmetic is on plain tensors.
"""

import re
from collections.abc import Mapping, Sequence
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
from titanlike.parallelisms.param_override import seeing

TOKENS = 1  # the dimension of a stream (B, T, D) that is shared between the matrices
WHOLE, OUT, IN = (
    Replicate(),
    Shard(0),
    Shard(1),
)  # of a weight: all of it, a share of its outputs, a share of its inputs


@dataclass(frozen=True)
class Style:
    """How one part of a model is shared: its parameters, what it is given, and what becomes of its result."""

    weight: Placement = WHOLE
    bias: Placement = WHOLE
    takes: Literal["what comes", "all tokens", "its tokens", "known words"] = "what comes"
    adds_up: bool = False  # each rank has a term of the result; a rank goes on with the sum for its share of the tokens


STYLES = {
    "vocab_parallel": Style(
        weight=OUT, takes="known words", adds_up=True
    ),  # an embedding of which each rank has some rows
    "position_embedding": Style(takes="its tokens"),  # an embedding that every rank has
    "sequence_parallel": Style(),  # a norm
    "all_gather_input": Style(takes="all tokens"),  # what has columns at its beginning
    "colwise": Style(weight=OUT, bias=OUT),  # a matrix of which each rank has some outputs
    "rowwise": Style(weight=IN, adds_up=True),  # a matrix of which each rank has some inputs
    "lm_head": Style(weight=OUT, bias=OUT, takes="all tokens"),  # a matrix at the end: some logits of every token
}


def apply_tensor(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Share the model's parts over `mesh` as its plan says. A `*` in the plan stands for a block's number."""
    if mesh.size() == 1:
        return
    shared: Any = cache(_shared)  # a class for all parts alike, so that one compiled block serves all
    for name, module in model.named_modules():
        part = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if part is not None:
            style = STYLES[part]
            for field, parameter in list(module.named_parameters(recurse=False)):
                placement = style.bias if field == "bias" else style.weight
                module.register_parameter(  # <- shares a matrix
                    field, nn.Parameter(distribute_tensor(parameter, mesh, [placement], src_data_rank=None))
                )
            module.__class__ = shared(type(module), style, mesh)
    # Shares are looked up in front of a block, outside of what is compiled: there the compiler meets plain tensors only.
    layers = blocks(model).values()
    ends = [module for name, module in model.named_children() if name != "layers"]
    for place in (*layers, *ends):
        parts = [module for module in place.modules() if hasattr(module, "refresh_local_params")]
        if parts:
            place.register_forward_pre_hook(partial(_take_shares, parts))
    forgotten = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if forgotten:
        raise UserError(
            f"the tensor-parallel plan of {type(model).__name__} does not name {forgotten[0].rpartition('.')[0]}; "
            f"add it, as one of {', '.join(STYLES)}"
        )

    def slice_dropout_bits(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        dropout_bits = named.get("dropout_bits")
        return args, named if dropout_bits is None else named | {"dropout_bits": _its_tokens(dropout_bits, mesh)}

    # Dropout falls on the stream, of which a rank has a share of the tokens.
    model.register_forward_pre_hook(slice_dropout_bits, with_kwargs=True)


def overlap_tensor(mesh: DeviceMesh) -> None:
    """Async tensor parallelism: the compiler cuts each gather and sum into pieces and multiplies in between."""
    if mesh.device_type != "cuda":
        raise UserError(
            "parallelism.async_tensor_parallel = true wants GPUs that reach each other's memory, but this runs on "
            f"{mesh.device_type}; set it false"
        )
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)
    torch._inductor.config._micro_pipeline_tp = True


def _shared(kind: Any, style: Style, mesh: DeviceMesh) -> type:
    """The same kind of module, which sees its parameters as this rank's share, and computes this rank's share."""
    rank, group = mesh.get_local_rank(), mesh.get_group()

    def share(module: Any, name: str) -> Tensor | None:
        # Where terms are added up, the bias comes after the sum.
        return None if style.adds_up and name == "bias" else module.mine.get(name)

    class Shared(seeing(kind, ("weight", "bias"), share)):  # type: ignore[misc]
        mine: dict[str, Tensor]  # kept after a pass: the backward pass may recompute with it
        gather = staticmethod(all_gather)  # a transform may put others in the place of these two
        scatter_sum = staticmethod(reduce_scatter)

        def refresh_local_params(self) -> None:
            """Look up this rank's share of the parameters."""
            mine = {}
            for name, placement in (("weight", style.weight), ("bias", style.bias)):
                parameter = self.own(name)
                if isinstance(parameter, DTensor):
                    # Of a parameter that all ranks have, each computes the gradient of its share of the work.
                    gradient = Partial() if placement == WHOLE else placement
                    mine[name] = parameter.to_local(grad_placements=[gradient])
            self.mine = mine

        def forward(self, x: Tensor, *others: Any) -> Tensor:
            known = None
            if style.takes == "all tokens":
                x = self.gather(x, TOKENS, group)
            elif style.takes == "its tokens":
                x = _its_tokens(x, mesh)
            elif style.takes == "known words":
                rows = self.num_embeddings // mesh.size()
                known = (x >= rank * rows) & (x < (rank + 1) * rows)
                x = (x - rank * rows).where(known, 0)
            out: Tensor = super().forward(x, *others)
            if known is not None:
                out = out.where(known[..., None], 0.0)
            if style.adds_up:
                out = self.scatter_sum(out, TOKENS, group)
                out = out + self.mine["bias"] if "bias" in self.mine else out
            return out

    Shared.style = style
    Shared.__name__ = Shared.__qualname__ = kind.__name__
    return Shared


def _take_shares(parts: Sequence[Any], *call: object) -> None:
    for part in parts:
        part.refresh_local_params()


def _its_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return x.chunk(mesh.size(), TOKENS)[mesh.get_local_rank()]
