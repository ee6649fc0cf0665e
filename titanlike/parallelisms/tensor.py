"""Tensor parallelism, with or without sequence parallelism, applied by a plan that maps module names to styles.

Attention and feed-forward compute all tokens with a local shard of the heads or of the hidden dimension. Elsewhere activations are
sharded along the sequence (sequence parallelism), or replicated.

Each module of the plan is replaced by one that communicates as its style says, and that owns the parameters as DTensors, so that
FSDP, checkpoints and gradient norms know their layout. The module that it replaces computes with plain tensors, this rank's shards.

docs/extending.md describes each style.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titanlike.config import UserError
from titanlike.config.base import nearest
from titanlike.distributed.autograd_collectives import (
    all_gather,
    all_reduce,
    all_reduce_gradient,
    gather,
    reduce_scatter,
    split,
)
from titanlike.models.common.experts import BalanceLoss
from titanlike.models.common.layers import TiedLMHead
from titanlike.parallelisms.blocks import Blocks, check_choice, find_blocks, list_blocks
from titanlike.parallelisms.sharded_norm import ShardedRMSNorm
from titanlike.utils.modules import ParameterOwner, replace_modules

SEQUENCE_DIM = 1  # of activations (B, T, D)
REPLICATED = Replicate()
LORA = {"lora_A": 1, "lora_B": 0}  # the sharded dimension: inputs of (rank, inputs), outputs of (outputs, rank)


@dataclass(frozen=True)
class Style:
    """What replaces a module, the placements of its parameters, and the layouts of its input and output."""

    replacement: "type[TensorParallelModule]"
    weight: Placement = REPLICATED
    bias: Placement = REPLICATED
    input_layout: Literal["any", "all_gather", "all_reduce_gradient", "local_shard"] = "any"
    reduce_output: Literal["", "reduce_scatter", "all_reduce"] = ""
    gather_output: bool = False
    partial_gradient: bool = (
        True  # of replicated parameters: a rank computes a part of the tokens, heads or hidden dimension
    )
    by_field: tuple[tuple[str, Placement], ...] = ()  # placements of parameters with other names
    module_class: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module

    def placement(self, field: str) -> Placement:
        """Returns the placement of a parameter. One of LoRA's matrices is sharded like the weight, and the other is replicated."""
        if field in LORA:
            return self.weight if self.weight == Shard(LORA[field]) else REPLICATED
        if field in dict(self.by_field):
            return dict(self.by_field)[field]
        return self.bias if field == "bias" else self.weight


class TensorParallelModule(ParameterOwner):
    """Owns DTensors. Its module computes with this rank's shards of them, which are read before the block runs, and kept after its
    forward pass for recomputation in the backward pass.

    FSDP shards the DTensors again: it replaces them in the dict of parameters, which owner and module share. What is read before a
    forward pass are the DTensors that FSDP has gathered. FSDP frees their storage afterwards, and fills the same storage before the
    backward pass, so that tensors that refer to it stay valid.
    """

    all_gather_input = staticmethod(all_gather)
    reduce_scatter_output = staticmethod(reduce_scatter)

    def __init__(self, module: nn.Module, style: Style, mesh: DeviceMesh) -> None:
        super().__init__(module)
        self.style, self.mesh, self.group = style, mesh, mesh.get_group()

    def set_collectives(self, *, all_gather_input: Any = None, reduce_scatter_output: Any = None) -> None:
        """Replaces collectives of sequence parallelism by others with the same arguments."""
        self.all_gather_input = all_gather_input or self.all_gather_input
        self.reduce_scatter_output = reduce_scatter_output or self.reduce_scatter_output

    def read_local_shards(self) -> None:
        """Reads the parameters."""
        self.set_tensors(self.local_shards(self._parameters))

    def local_shards(self, parameters: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Returns this rank's shards of parameters."""
        shards = {}
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                local = parameter.to_local(grad_placements=parameter.placements)
                # The last dimension of the mesh: the experts' may be before it.
                sums = (self.style.partial_gradient or name in LORA) and parameter.placements[-1].is_replicate()
                shards[name] = all_reduce_gradient(local, self.group) if sums else local
        return shards

    def reduce_output(self, out: Tensor) -> Tensor:
        """Sums over the ranks what each has computed of the output."""
        if self.style.reduce_output == "reduce_scatter":
            return self.reduce_scatter_output(out, SEQUENCE_DIM, self.group)
        return all_reduce(out, self.group)


class LocalTokens(TensorParallelModule):
    """A norm, router or other layer that computes the tokens or heads that it gets, with replicated parameters. Or an embedding
    that looks up its shard of the channels."""


class HeadParallel(TensorParallelModule):
    """A vector of which a rank has the numbers of its heads."""


class ColwiseNorm(TensorParallelModule):
    """An RMSNorm over the outputs of a colwise layer, of which a rank has a part: it divides by the root mean square of all."""

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self.module
        return cast(Tensor, ShardedRMSNorm.apply(x, norm.weight, norm.eps, self.group))


class AllGatherInput(TensorParallelModule):
    """Attention or a feed-forward layer, whose colwise layers read all tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _map_first(self.gather_input, args, kwargs)
        return self.module(*args, **kwargs)

    def gather_input(self, x: Tensor) -> Tensor:
        """Returns all tokens."""
        if self.style.input_layout == "all_gather":
            return self.all_gather_input(x, SEQUENCE_DIM, self.group)
        return all_reduce_gradient(x, self.group) if self.style.input_layout == "all_reduce_gradient" else x


class ColwiseLinear(AllGatherInput):
    """A linear layer or LM head that computes a shard of the outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return gather(out, -1, self.group) if self.style.gather_output else out


class ColwiseTiedHead(ColwiseLinear):
    """An LM head that computes a shard of the vocabulary with the weight of the token embedding."""

    def __init__(self, head: TiedLMHead, style: Style, mesh: DeviceMesh) -> None:
        super().__init__(head, style, mesh)
        self.embedding = head.embedding
        self.local = SimpleNamespace(weight=None)
        computing: Any = self.module
        computing.embedding = (self.local,)

    def read_local_shards(self) -> None:
        """Reads the bias and the weight of the embedding."""
        super().read_local_shards()
        self.local.weight = self.local_shards({"weight": self.embedding[0].weight})["weight"]


class RowwiseLinear(TensorParallelModule):
    """A linear layer that computes with a shard of the inputs. The bias is added once, after the sum over the ranks."""

    bias_of_sum: Mapping[str, Tensor] = {}

    def read_local_shards(self) -> None:
        """Reads the parameters."""
        shards = self.local_shards(self._parameters)
        self.bias_of_sum = {"bias": shards.pop("bias")} if "bias" in shards else {}
        self.set_tensors(shards)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out = self.reduce_output(self.module(*args, **kwargs))
        return out + self.bias_of_sum["bias"] if self.bias_of_sum else out


class TensorParallelExperts(RowwiseLinear):
    """Stacked experts that compute a shard of their hidden dimension."""

    def local_shards(self, parameters: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Returns this rank's shards of parameters. The results of an expert have weights, so that its bias cannot be added after
        the sum over the ranks: each adds a part."""
        shards = super().local_shards(parameters)
        return shards | {name: bias / self.mesh.size() for name, bias in shards.items() if name == "w2_bias"}


class VocabParallelEmbedding(TensorParallelModule):
    """An embedding of which each rank holds a part of the vocabulary."""

    def __init__(self, embedding: nn.Embedding, style: Style, mesh: DeviceMesh) -> None:
        super().__init__(embedding, style, mesh)
        self.rank, self.num_rows = mesh.get_local_rank(), embedding.num_embeddings // mesh.size()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ids = args[0] if args else next(iter(kwargs.values()))
        if self.style.reduce_output == "reduce_scatter":
            _check_sequence(ids, self.mesh, SEQUENCE_DIM)
        rank, rows = self.rank, self.num_rows
        in_shard = (ids >= rank * rows) & (ids < (rank + 1) * rows)
        out = self.module((ids - rank * rows).where(in_shard, 0))
        return self.reduce_output(out.where(in_shard[..., None], 0.0))


class PositionEmbedding(TensorParallelModule):
    """An embedding with replicated parameters, of the positions of the local tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = _map_first(self.local_positions, args, kwargs)
        return self.module(*args, **kwargs)

    def local_positions(self, ids: Tensor) -> Tensor:
        """Returns the part of the sequence that this rank holds."""
        return _local_tokens(ids, self.mesh, -1) if self.style.input_layout == "local_shard" else ids


# A further style is a row here and, if no class above communicates as it does, a class; docs/extending.md lists the other places.
STYLES = {
    "colwise": Style(ColwiseLinear, Shard(0), Shard(0), "all_gather", module_class=nn.Linear),
    "rowwise": Style(RowwiseLinear, Shard(1), reduce_output="reduce_scatter", module_class=nn.Linear),
    "all_gather_input": Style(AllGatherInput, input_layout="all_gather"),
    "sequence_parallel": Style(LocalTokens),
    "replicated": Style(LocalTokens),
    "router": Style(LocalTokens),
    "head_parallel": Style(HeadParallel, Shard(0)),
    "colwise_norm": Style(ColwiseNorm, Shard(0), module_class=nn.RMSNorm),
    "experts": Style(
        TensorParallelExperts,
        reduce_output="reduce_scatter",
        by_field=(("w1", Shard(1)), ("w1_bias", Shard(1)), ("w2", Shard(2)), ("w3", Shard(1)), ("w3_bias", Shard(1))),
    ),
    "vocab_parallel": Style(
        VocabParallelEmbedding, Shard(0), REPLICATED, reduce_output="reduce_scatter", module_class=nn.Embedding
    ),
    "position_embedding": Style(PositionEmbedding, input_layout="local_shard", module_class=nn.Embedding),
    "colwise_embedding": Style(LocalTokens, Shard(1), module_class=nn.Embedding),
    "lm_head": Style(ColwiseLinear, Shard(0), Shard(0), "all_gather", module_class=(nn.Linear, TiedLMHead)),
    "colwise_gather_output": Style(
        ColwiseLinear, Shard(0), Shard(0), "all_gather", gather_output=True, module_class=nn.Linear
    ),
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
        plan: a style (docs/extending.md) for the name of each module that has parameters; `*` stands for a part of a dotted name,
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
    replacements: dict[nn.Module, TensorParallelModule] = {}
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
        replacement: Any = ColwiseTiedHead if isinstance(module, TiedLMHead) else style.replacement
        replacements[module] = replacement(module, style, mesh)
    replace_modules(model, replacements)  # <- replaces the layers
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
    # Local shards are read before each block runs, outside of compiled code, which then traces plain tensors only. FSDP, applied
    # later, puts its hook that gathers the parameters before this one (`prepend=True`).
    rest = dict.fromkeys(replacements.values())
    for block in find_blocks(model) if blocks is None else list_blocks(blocks):
        block = replacements.get(block, block)
        inside = [child for child in block.modules() if child in rest]
        block.register_forward_pre_hook(partial(_read_local_shards, inside))
        for child in inside:
            del rest[child]
    for module in rest:
        module.register_forward_pre_hook(partial(_read_local_shards, [module]))
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
    # Modules that are None, as on other pipeline stages, count as known.
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
            wanted = "vocab_parallel, position_embedding or colwise_embedding" if needs_embedding else "another style"
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
                partial_gradient=style_name in ("replicated", "router", "experts"),
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
        return _map_first(lambda x: split(x, SEQUENCE_DIM, group) if x.is_floating_point() else x, args, kwargs)

    def gather_output(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        is_local = isinstance(out, Tensor) and out.dim() > 2 and out.shape[SEQUENCE_DIM] * mesh.size() == lengths[0]
        return gather(out, SEQUENCE_DIM, group) if is_local else out

    model.register_forward_pre_hook(split_input, with_kwargs=True)
    model.register_forward_hook(gather_output)


def _read_local_shards(modules: list[TensorParallelModule], *hook_args: object) -> None:
    for module in modules:
        module.read_local_shards()


def _map_first(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments, to the first of which, positional or not, a function is applied."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    name, value = next(iter(kwargs.items()))
    return args, kwargs | {name: function(value)}


def _local_tokens(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    return _check_sequence(x, mesh, dim).chunk(mesh.size(), dim)[mesh.get_local_rank()]


def _check_sequence(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    if x.dim() <= dim or x.shape[dim] % mesh.size():
        raise UserError(
            f"sequence parallelism over {mesh.size()} ranks splits dimension {dim} of an input of shape {tuple(x.shape)}, which "
            f"must be divisible by {mesh.size()}; pad the sequence, or pass sequence_parallel=False"
        )
    return x
