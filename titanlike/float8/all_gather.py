"""FSDP all-gather in float8: each rank casts its shard before the all-gather, which sends one byte per element.

A shard is cast with the scale of the full weight. All scales become stale at once, after an optimizer step. They are recomputed
together, by one all-reduce for all weights of a model, before the first all-gather of the next step.
"""

from collections import Counter
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

from titanlike.float8.linear import WEIGHT, Float8Linear, Float8TrainingTensor, amax_to_scale, float8_dtype, to_float8
from titanlike.utils.dtensor import shard_groups

aten = torch.ops.aten

# The operations of FSDP, `to_empty` and initialization on a shard. Their results are wrapped again.
OPERATIONS = "detach empty_like new_zeros slice copy_ view as_strided _to_copy _pin_memory split clone"
WRAPPED_OPERATIONS = {getattr(aten, name) for name in OPERATIONS.split()}


@cache
def optimizer_steps() -> Counter[str]:
    """Returns a counter of the optimizer steps in this process. A global hook counts those of every optimizer."""
    counter: Counter[str] = Counter()
    register_optimizer_step_post_hook(lambda *_: counter.update(["steps"]))
    return counter


@dataclass(eq=False)
class WeightScale:
    """The scale of one weight, shared by all tensors derived from it."""

    mm_config: Any
    updater: "ScaleUpdater"
    scale: Tensor | None = None


class Float8Shard(torch.Tensor):
    """A shard that FSDP all-gathers in float8. Other operations see the high-precision tensor that it wraps."""

    stored: Tensor
    weight_scale: WeightScale

    @staticmethod
    def __new__(cls: type, tensor: Tensor, weight_scale: WeightScale) -> "Float8Shard":
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
        self.stored, self.weight_scale = tensor, weight_scale
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight_scales: list[WeightScale] = []

        def unwrap(shard: "Float8Shard") -> Tensor:
            weight_scales.append(shard.weight_scale)
            return shard.stored

        args, kwargs = pytree.tree_map_only(Float8Shard, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func.overloadpacket not in WRAPPED_OPERATIONS:
            return out
        return pytree.tree_map_only(Tensor, lambda tensor: Float8Shard(tensor, weight_scales[0]), out)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["stored"], self.weight_scale

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scale: WeightScale, size: Any, stride: Any) -> "Float8Shard":
        return Float8Shard(inner["stored"], scale)

    def fsdp_pre_all_gather(
        self, mesh: Any, size: torch.Size, stride: Any, module: nn.Module, precision: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor]]:
        """Returns the all-gather input, as bytes: not every backend supports float8."""
        self.weight_scale.updater.update()
        scale = self.weight_scale.scale
        assert scale is not None
        float8: Any = to_float8(self.stored, WEIGHT, self.weight_scale.mm_config, scale=scale)
        rows = -(-size[0] // mesh.size())  # the last ranks may have fewer rows and pad them
        data = F.pad(float8._data.view(torch.uint8), (0, 0, 0, rows - self.shape[0]))
        return (data,), (scale,)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], scales: tuple[Tensor], dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Returns the unsharded weight in float8, or updates the scale of an existing one."""
        if out is not None:
            weight: Any = out._local_tensor if isinstance(out, DTensor) else out
            weight._scale = scales[0]
            return None
        data = gathered[0].view(float8_dtype(WEIGHT))
        return Float8TrainingTensor(data, scales[0], dtype, self.weight_scale.mm_config, WEIGHT), (gathered[0],)


def wrap_weights(model: nn.Module) -> None:
    """Wraps the weights of float8 modules in `Float8Shard`. Call it before FSDP is applied."""
    updater = ScaleUpdater(model)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            weight, scale = module._parameters["weight"], WeightScale(module.linear_mm_config, updater)
            assert weight is not None
            if isinstance(weight, DTensor):
                shard: Tensor = DTensor(Float8Shard(weight._local_tensor, scale), weight._spec, requires_grad=False)
            else:
                shard = Float8Shard(weight.detach(), scale)
            module.register_parameter("weight", nn.Parameter(shard))
            module.register_state_dict_post_hook(_unwrap)
            module.register_load_state_dict_post_hook(updater.mark_stale)


class ScaleUpdater:
    """Recomputes the scales of all wrapped weights of a model after the weights have changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights: list[DTensor] = []
        self.optimizer_steps = optimizer_steps()
        self.updated_at = -1  # number of optimizer steps at the last update

    def mark_stale(self, *hook_args: object) -> None:
        """Marks the scales as stale after a change other than an optimizer step."""
        self.updated_at = -1

    @torch.no_grad()
    def update(self) -> None:
        """Recomputes the scales if they are stale."""
        if self.updated_at == self.optimizer_steps["steps"]:
            return
        self.updated_at = self.optimizer_steps["steps"]
        if not self.weights:  # found before the first all-gather; later FSDP may swap in unsharded parameters
            parameters = [p for p in self.model.parameters() if isinstance(p, DTensor)]
            self.weights = [p for p in parameters if isinstance(p._local_tensor, Float8Shard)]
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[Float8Shard]] = {}
        for weight in self.weights:
            by_groups.setdefault(shard_groups(weight), []).append(cast(Float8Shard, weight._local_tensor))
        for groups, shards in by_groups.items():
            non_empty = [shard.stored for shard in shards if shard.numel()]  # there may be more ranks than rows
            norms = iter(torch._foreach_norm(non_empty, ord=torch.inf) if non_empty else [])
            zero = shards[0].stored.new_zeros(())
            amax = torch.stack([next(norms) if shard.numel() else zero for shard in shards])
            for group in groups:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
            for shard, scale in zip(shards, amax_to_scale(amax, float8_dtype(WEIGHT)).unbind(), strict=True):
                shard.weight_scale.scale = scale


def _unwrap(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Replaces a wrapped weight in a state dict by the high-precision one, which loads with or without float8."""
    weight = state[prefix + "weight"]
    if isinstance(weight, DTensor) and isinstance(weight._local_tensor, Float8Shard):
        state[prefix + "weight"] = DTensor(weight._local_tensor.stored, weight._spec, requires_grad=False)
    elif isinstance(weight, Float8Shard):
        state[prefix + "weight"] = weight.stored
