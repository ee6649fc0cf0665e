"""Tensor parallelism, with or without sequence parallelism, applied by a plan that maps module names to styles.

Attention and feed-forward compute all tokens with a local shard of the heads or of the hidden dimension. Elsewhere activations are
sharded along the sequence (sequence parallelism), or replicated.

Parameters are DTensors, so that FSDP, checkpoints and gradient norms know their layout. The forward pass uses plain tensors.

| Style | Module | With sequence parallelism | Without |
|---|---|---|---|
| `colwise` | `nn.Linear` | shards outputs; all-gathers the input, unless an enclosing module does | all-reduces its gradient |
| `rowwise` | `nn.Linear` | shards inputs; reduce-scatters the output | all-reduces the output |
| `all_gather_input` | attention, feed-forward | all-gathers the first argument for its colwise layers | all-reduces its gradient |
| `sequence_parallel` | norm | replicated parameters; computes the local tokens | computes all tokens |
| `qk_norm` | norm of queries or keys | replicated parameters; computes the local heads | the same |
| `router` | router of a mixture of experts | replicated parameters; routes all tokens | the same |
| `experts` | stacked experts | shards the hidden dimension; reduce-scatters the output | all-reduces the output |
| `vocab_parallel` | `nn.Embedding` | shards the vocabulary; reduce-scatters the output | all-reduces the output |
| `position_embedding` | `nn.Embedding` | replicated parameters; looks up the local tokens | looks up all tokens |
| `lm_head` | `nn.Linear` | as `colwise`; logits are sharded along the vocabulary | the same |
| `colwise_gather_output` | `nn.Linear` | as `colwise`; all-gathers the output, so that every rank has all of it | the same |
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titanlike.config import UserError
from titanlike.config.load import nearest
from titanlike.distributed.collectives import (
    all_gather,
    all_reduce,
    all_reduce_gradient,
    gather,
    reduce_scatter,
    split,
)
from titanlike.models.experts import BalanceLoss
from titanlike.parallelisms.blocks import Blocks, check_choice, find_blocks, list_blocks
from titanlike.parallelisms.param_override import override_params

SEQUENCE_DIM = 1  # of activations (B, T, D)
REPLICATED = Replicate()
LORA = {"lora_A": 1, "lora_B": 0}  # the sharded dimension: inputs of (rank, inputs), outputs of (outputs, rank)


@dataclass(frozen=True)
class Style:
    """The placements of a module's parameters, and the layouts of its input and output."""

    weight: Placement = REPLICATED
    bias: Placement = REPLICATED
    input_layout: Literal["any", "all_gather", "all_reduce_gradient", "local_shard", "vocab_mask"] = "any"
    reduce_output: Literal["", "reduce_scatter", "all_reduce"] = ""
    gather_output: bool = False
    partial_gradient: bool = (
        True  # of replicated parameters: a rank computes a part of the tokens, heads or hidden dimension
    )
    by_field: tuple[tuple[str, Placement], ...] = ()  # placements of parameters with other names
    module_class: type[nn.Module] = nn.Module

    def placement(self, field: str) -> Placement:
        """Returns that of a parameter. One of LoRA's matrices is sharded like the weight, and the other is replicated."""
        if field in LORA:
            return self.weight if self.weight == Shard(LORA[field]) else REPLICATED
        if field in dict(self.by_field):
            return dict(self.by_field)[field]
        return self.bias if field == "bias" else self.weight


STYLES = {
    "colwise": Style(Shard(0), Shard(0), "all_gather", module_class=nn.Linear),
    "rowwise": Style(Shard(1), reduce_output="reduce_scatter", module_class=nn.Linear),
    "all_gather_input": Style(input_layout="all_gather"),
    "sequence_parallel": Style(),
    "qk_norm": Style(),
    "router": Style(),
    "experts": Style(reduce_output="reduce_scatter", by_field=(("w1", Shard(1)), ("w2", Shard(2)), ("w3", Shard(1)))),
    "vocab_parallel": Style(Shard(0), REPLICATED, "vocab_mask", "reduce_scatter", module_class=nn.Embedding),
    "position_embedding": Style(input_layout="local_shard", module_class=nn.Embedding),
    "lm_head": Style(Shard(0), Shard(0), "all_gather", module_class=nn.Linear),
    "colwise_gather_output": Style(Shard(0), Shard(0), "all_gather", gather_output=True, module_class=nn.Linear),
}


def apply_tensor(
    model: nn.Module,
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    *,
    blocks: Blocks | None = None,
    sequence_parallel: bool = True,
    replicated_io: bool = True,
) -> None:
    """Shards the modules that the plan names over `mesh`, in place. All ranks must hold the same parameters.

    Args:
        plan: a style of the table above for the name of each module that has parameters; `*` stands for a part of a dotted name,
            such as the index of a block.
        blocks: the modules that are compiled. Their local shards are read before each of them runs, outside of compiled code.
            Default: `find_blocks`.
        sequence_parallel: shards activations along the sequence between the sharded modules. False replicates them.
        replicated_io: with sequence parallelism, splits a floating-point input (B, T, ...) along the sequence, and all-gathers the
            output if it is sharded, so that the caller sees full sequences. Token ids are split by their embedding. False if the
            caller's activations are sharded, as between pipeline stages.
    """
    if mesh.ndim != 1:
        raise UserError(
            f"apply_tensor takes a mesh of one dimension, but this one has {mesh.ndim}; pass mesh['tensor']"
        )
    styles = _styles_by_module(model, plan, sequence_parallel)
    if mesh.size() == 1:
        return
    cached_class: Any = cache(_tensor_parallel_class)  # blocks of the same classes share one compiled forward
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for name, (style_name, style) in styles.items():
        module = model.get_submodule(name)
        for field, parameter in list(module.named_parameters(recurse=False)):
            placement = style.placement(field)
            if parameter not in sharded:
                _check_divisible(f"{name}.{field} ({style_name})", parameter, placement, mesh)
                sharded[parameter] = nn.Parameter(  # <- shards a parameter
                    distribute_tensor(parameter, mesh, [placement], src_data_rank=None), parameter.requires_grad
                )
            if cast(DTensor, sharded[parameter]).placements != (placement,):
                raise UserError(
                    f"{name}.{field} ({style_name}) is tied to a parameter that another style shards differently"
                )
            module.register_parameter(field, sharded[parameter])
        fields = dict.fromkeys(("weight", "bias", *module._parameters))
        module.__class__ = cached_class(type(module), tuple(fields), style, mesh)
    for module in model.modules():
        if isinstance(module, BalanceLoss):  # routers compute all tokens
            module.num_replicas = mesh.size()
    unplanned = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if unplanned:
        owner = unplanned[0].rpartition(".")[0] or "'', the model itself"
        raise UserError(
            f"the tensor-parallel plan of {type(model).__name__} does not name {owner}; "
            f"add it with one of the styles {', '.join(STYLES)}"
        )
    # Local shards are read before each block runs, outside of compiled code, which then traces plain tensors only.
    rest = dict.fromkeys(model.get_submodule(name) for name in styles)
    for block in find_blocks(model) if blocks is None else list_blocks(blocks):
        inside = [child for child in block.modules() if child in rest]
        block.register_forward_pre_hook(partial(_refresh_local_params, inside))
        for child in inside:
            del rest[child]
    for module in rest:
        module.register_forward_pre_hook(partial(_refresh_local_params, [module]))
    if not sequence_parallel:
        return

    def shard_dropout_bits(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bits = kwargs.get("dropout_bits")
        return args, kwargs if bits is None else kwargs | {"dropout_bits": _local_tokens(bits, mesh, SEQUENCE_DIM)}

    # Dropout is applied to activations that are sharded along the sequence.
    model.register_forward_pre_hook(shard_dropout_bits, with_kwargs=True)
    if replicated_io:
        _replicate_io(model, mesh)


def _styles_by_module(
    model: nn.Module, plan: Mapping[str, str], sequence_parallel: bool
) -> dict[str, tuple[str, Style]]:
    """Returns the name and the properties of the style of each module that the plan names. Raises `UserError` for what it cannot
    mean."""
    # Modules that are None, as those of other pipeline stages, count as known.
    children = (f"{name}.{child}".lstrip(".") for name, module in model.named_modules() for child in module._modules)
    known = ["", *children]
    found: dict[str, tuple[str, Style]] = {}
    for pattern, style_name in plan.items():
        check_choice(f"the tensor-parallel style of {pattern}", style_name, STYLES)
        matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        names = [name for name in known if matches(name)]
        if not names:
            near = nearest(pattern, list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in known)))
            raise UserError(
                f"the tensor-parallel plan names {pattern}, but {type(model).__name__} has no such module"
                + (f"; did you mean {near}?" if near else "")
            )
        found |= {name: (style_name, STYLES[style_name]) for name in names}
    modules = dict(model.named_modules())
    gathered = tuple(f"{name}." for name, (style_name, _) in found.items() if style_name == "all_gather_input")
    for name in list(found):
        if name not in modules:
            del found[name]
            continue
        style_name, style = found[name]
        module = modules[name]
        parameters = list(module.parameters(recurse=False))
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise UserError(f"{name} is sharded already; apply tensor parallelism once, and before FSDP")
        needs_embedding = isinstance(module, nn.Embedding) and style.module_class is not nn.Embedding
        if parameters and (needs_embedding or not isinstance(module, style.module_class)):
            wanted = "vocab_parallel or position_embedding" if needs_embedding else "another style"
            raise UserError(
                f"the tensor-parallel style {style_name} of {name} does not apply to {type(module).__name__}; use {wanted}"
            )
        if name.startswith(gathered) and style.input_layout == "all_gather":
            style = replace(style, input_layout="any")
        if not sequence_parallel:
            layouts: dict[str, Any] = {"all_gather": "all_reduce_gradient", "local_shard": "any"}
            style = replace(
                style,
                input_layout=layouts.get(style.input_layout, style.input_layout),
                reduce_output="all_reduce" if style.reduce_output else "",
                partial_gradient=style_name in ("qk_norm", "router"),
            )
        found[name] = style_name, style
    return found


def _check_divisible(name: str, parameter: Tensor, placement: Placement, mesh: DeviceMesh) -> None:
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
        raise UserError(
            f"{name}: {mesh.size()} tensor-parallel ranks do not divide dimension {placement.dim} of the shape "
            f"{tuple(parameter.shape)}; use another number of ranks or another size"
        )


def _replicate_io(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits a floating-point input of the model along the sequence, and gathers its output if it is sharded."""
    group, lengths = mesh.get_group(), list[int]()

    def split_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x = args[0] if args else next(iter(kwargs.values()))
        lengths[:] = [_check_sequence(x, mesh, SEQUENCE_DIM).shape[SEQUENCE_DIM]]
        return _with_first(split(x, SEQUENCE_DIM, group), args, kwargs) if x.is_floating_point() else (args, kwargs)

    def gather_output(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        is_local = isinstance(out, Tensor) and out.dim() > 2 and out.shape[SEQUENCE_DIM] * mesh.size() == lengths[0]
        return gather(out, SEQUENCE_DIM, group) if is_local else out

    model.register_forward_pre_hook(split_input, with_kwargs=True)
    model.register_forward_hook(gather_output)


def _tensor_parallel_class(module_class: Any, fields: tuple[str, ...], style: Style, mesh: DeviceMesh) -> type:
    """Returns a subclass that computes with local shards of its parameters."""
    rank, group = mesh.get_local_rank(), mesh.get_group()

    def get_local_param(module: Any, name: str) -> Tensor | None:
        # The bias of a reduced output is added once, after the reduction.
        return None if style.reduce_output and name == "bias" else module.local_params.get(name)

    class TensorParallel(override_params(module_class, fields, get_local_param)):  # type: ignore[misc]
        local_params: dict[str, Tensor]  # kept after the forward pass for recomputation in the backward pass
        all_gather_input = staticmethod(all_gather)  # float8 replaces these two collectives
        reduce_scatter_output = staticmethod(reduce_scatter)

        def refresh_local_params(self) -> None:
            """Reads the local shards of the parameters."""
            self.local_params = {}
            for name in fields:
                parameter = self.original_param(name)
                if isinstance(parameter, DTensor):
                    local = parameter.to_local(grad_placements=parameter.placements)
                    sums = (style.partial_gradient or name in LORA) and parameter.placements[0].is_replicate()
                    self.local_params[name] = all_reduce_gradient(local, group) if sums else local

        def forward(self, *args: Any, **named: Any) -> Any:
            in_vocab_shard = None
            if style.input_layout != "any":
                x = args[0] if args else next(iter(named.values()))
                if style.input_layout == "all_gather":
                    x = self.all_gather_input(x, SEQUENCE_DIM, group)
                elif style.input_layout == "all_reduce_gradient":
                    x = all_reduce_gradient(x, group)
                elif style.input_layout == "local_shard":
                    x = _local_tokens(x, mesh, -1)
                else:
                    if style.reduce_output == "reduce_scatter":
                        _check_sequence(x, mesh, SEQUENCE_DIM)
                    rows = self.num_embeddings // mesh.size()
                    in_vocab_shard = (x >= rank * rows) & (x < (rank + 1) * rows)
                    x = (x - rank * rows).where(in_vocab_shard, 0)
                args, named = _with_first(x, args, named)
            out = super().forward(*args, **named)
            if in_vocab_shard is not None:
                out = out.where(in_vocab_shard[..., None], 0.0)
            if style.reduce_output:
                scatters = style.reduce_output == "reduce_scatter"
                out = self.reduce_scatter_output(out, SEQUENCE_DIM, group) if scatters else all_reduce(out, group)
                out = out + self.local_params["bias"] if "bias" in self.local_params else out
            return gather(out, -1, group) if style.gather_output else out

    TensorParallel.style = style
    TensorParallel.__name__ = TensorParallel.__qualname__ = module_class.__name__
    return TensorParallel


def _refresh_local_params(modules: list[Any], *hook_args: object) -> None:
    for module in modules:
        module.refresh_local_params()


def _with_first(x: Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments, the first of which, positional or not, is replaced by `x`."""
    return ((x, *args[1:]), named) if args else ((), named | {next(iter(named)): x})


def _local_tokens(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    return _check_sequence(x, mesh, dim).chunk(mesh.size(), dim)[mesh.get_local_rank()]


def _check_sequence(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    if x.dim() <= dim or x.shape[dim] % mesh.size():
        raise UserError(
            f"sequence parallelism over {mesh.size()} ranks splits dimension {dim} of an input of shape {tuple(x.shape)}, which "
            f"must be divisible by {mesh.size()}; pad the sequence, or pass sequence_parallel=False"
        )
    return x
