"""FSDP's all-gather in float8: a rank keeps its shard of a weight as it is, and sends it as one byte a number.

A shard is cast with the scale of the whole weight. All those scales change together, when the optimizer has made a step, so
they are found together: one maximum over the ranks for all weights of a model, at the first gather after it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from titanlike.float8.linear import WEIGHT, Float8Linear, Float8TrainingTensor, dtype_of, scale_of, to_float8
from titanlike.utils.dtensor import shard_groups

aten = torch.ops.aten

# What FSDP, and what gives a model its memory and values, does to a shard: the result is such a shard again.
OPERATIONS = "detach empty_like new_zeros slice copy_ view as_strided _to_copy _pin_memory split clone"
KEEPS = {getattr(aten, name) for name in OPERATIONS.split()}


class Steps:
    """Counts the steps of whatever optimizer, so that none can be forgotten."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self.add)

    def add(self, *_: object) -> None:
        """One more."""
        self.count += 1


@cache
def steps() -> Steps:
    """Those of this process, counted from the first call on."""
    return Steps()


@dataclass(eq=False)
class Scaling:
    """One weight's scale, shared by all that is cut from it or made of it."""

    mm_config: Any
    scales: "Scales"
    scale: Tensor | None = None


class Shard(torch.Tensor):
    """A tensor that FSDP gathers in float8 with a scale that is known. To everything else it is what it wraps."""

    stored: Tensor
    scaling: Scaling

    @staticmethod
    def __new__(cls: type, tensor: Tensor, scaling: Scaling) -> "Shard":
        self: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        self.stored, self.scaling = tensor, scaling
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found: list[Scaling] = []

        def unwrap(shard: "Shard") -> Tensor:
            found.append(shard.scaling)
            return shard.stored

        args, kwargs = pytree.tree_map_only(Shard, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func.overloadpacket not in KEEPS:
            return out
        return pytree.tree_map_only(Tensor, lambda tensor: Shard(tensor, found[0]), out)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["stored"], self.scaling

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scaling: Scaling, size: Any, stride: Any) -> "Shard":
        return Shard(inner["stored"], scaling)

    def fsdp_pre_all_gather(
        self, mesh: Any, size: torch.Size, stride: Any, module: nn.Module, precision: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor]]:
        """What FSDP sends, as bytes: not every backend knows float8."""
        self.scaling.scales.update()
        assert self.scaling.scale is not None
        mine: Any = to_float8(self.stored, WEIGHT, self.scaling.mm_config, scale=self.scaling.scale)
        rows = -(-size[0] // mesh.size())  # of every rank's share: the last ones may have less, and fill up
        data = F.pad(mine._data.view(torch.uint8), (0, 0, 0, rows - self.shape[0]))
        return (data,), (self.scaling.scale,)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], scales: tuple[Tensor], dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight, in float8."""
        if out is not None:
            weight: Any = out._local_tensor if isinstance(out, DTensor) else out
            weight._scale = scales[0]
            return None
        data = gathered[0].view(dtype_of(WEIGHT))
        return Float8TrainingTensor(data, scales[0], dtype, self.scaling.mm_config, WEIGHT), (gathered[0],)


def wrap_weights(model: nn.Module) -> None:
    """Have FSDP, which comes next, gather the float8 matrices of a model in float8."""
    scales = Scales(model)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            weight, scaling = module._parameters["weight"], Scaling(module.linear_mm_config, scales)
            assert weight is not None
            if isinstance(weight, DTensor):
                shard: Tensor = DTensor(Shard(weight._local_tensor, scaling), weight._spec, requires_grad=False)
            else:
                shard = Shard(weight.detach(), scaling)
            module.register_parameter("weight", nn.Parameter(shard))
            module.register_state_dict_post_hook(_unwrap)
            module.register_load_state_dict_post_hook(scales.forget)


class Scales:
    """The scales of all wrapped weights of a model. They change together, and are found together."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights: list[DTensor] = []
        self.steps = steps()
        self.known = -1  # the number of steps that the scales know of

    def forget(self, *_: object) -> None:
        """The weights have changed otherwise."""
        self.known = -1

    @torch.no_grad()
    def update(self) -> None:
        """Find the scales anew if the weights have changed."""
        if self.known == self.steps.count:
            return
        self.known = self.steps.count
        if not self.weights:  # at the first gather all are shards; later some may have whole ones in their places
            parameters = [p for p in self.model.parameters() if isinstance(p, DTensor)]
            self.weights = [p for p in parameters if isinstance(p._local_tensor, Shard)]
        by_group: dict[tuple[dist.ProcessGroup, ...], list[Shard]] = {}
        for weight in self.weights:
            by_group.setdefault(shard_groups(weight), []).append(cast(Shard, weight._local_tensor))
        for groups, shards in by_group.items():
            full = [shard.stored for shard in shards if shard.numel()]  # there may be more ranks than rows
            norms = iter(torch._foreach_norm(full, ord=torch.inf) if full else [])
            nothing = shards[0].stored.new_zeros(())
            largest = torch.stack([next(norms) if shard.numel() else nothing for shard in shards])
            for group in groups:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            for shard, scale in zip(shards, scale_of(largest, WEIGHT).unbind(), strict=True):
                shard.scaling.scale = scale


def _unwrap(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Outside of the model a weight is a plain one: what is saved can be read by any layout, with or without float8."""
    weight = state[prefix + "weight"]
    if isinstance(weight, DTensor) and isinstance(weight._local_tensor, Shard):
        state[prefix + "weight"] = DTensor(weight._local_tensor.stored, weight._spec, requires_grad=False)
    elif isinstance(weight, Shard):
        state[prefix + "weight"] = weight.stored
