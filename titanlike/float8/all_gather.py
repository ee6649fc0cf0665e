"""FSDP all-gather in float8: each rank casts its shard before the all-gather, which sends one byte per element.

A shard is cast with the scale of the full weight. All scales become stale at once, after an optimizer step. They are recomputed
together, by one all-reduce for all weights of a model, before the first all-gather of the next step.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlike.config import UserError
from titanlike.float8.linear import WEIGHT, Float8TrainingTensor, float8_dtype, matmul_of, scale_of
from titanlike.float8.weight_maxima import WeightChanges, weight_maxima
from titanlike.utils.compat import disabled_torch_function, make_wrapper_subclass, tree_map_only

aten = torch.ops.aten

# The operations of FSDP, `to_empty` and initialization on a shard. Their results are wrapped again.
OPERATIONS = "detach empty_like new_zeros slice copy_ view as_strided _to_copy _pin_memory split clone"
WRAPPED_OPERATIONS = {getattr(aten, name) for name in OPERATIONS.split()}


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
        self: Any = make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        self.stored, self.weight_scale = tensor, weight_scale
        return self

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight_scales: list[WeightScale] = []

        def unwrap(shard: "Float8Shard") -> Tensor:
            weight_scales.append(shard.weight_scale)
            return shard.stored

        args, kwargs = tree_map_only(Float8Shard, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func.overloadpacket not in WRAPPED_OPERATIONS:
            return out
        return tree_map_only(Tensor, lambda tensor: Float8Shard(tensor, weight_scales[0]), out)

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
        rows = -(-size[0] // mesh.size())  # the last ranks may have fewer; the others of their input are not read
        data = self.stored.new_empty((rows, *size[1:]), dtype=float8_dtype(WEIGHT))
        # One kernel, without copies. No value exceeds the maximum of the full weight: none overflows.
        torch.mul(self.stored, scale[None], out=data[: self.shape[0]])
        return (data.view(torch.uint8),), (scale,)

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
    """Wraps the weights of float8 modules in `Float8Shard`. Call it after `apply_float8` and before FSDP is applied."""
    updater = ScaleUpdater(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            raise UserError("float8 weights are wrapped before FSDP is applied, but the model has FSDP modules")
        if (matmul := matmul_of(module)) is not None:
            if not matmul.is_tensorwise:
                raise UserError(
                    "the float8 all-gather requires one scale per matrix; set float8.scaling = 'tensorwise'"
                )
            weight, scale = module._parameters["weight"], WeightScale(matmul.mm_config, updater)
            assert weight is not None
            if isinstance(weight, DTensor):
                shard: Tensor = DTensor(Float8Shard(weight._local_tensor, scale), weight._spec, requires_grad=False)
            else:
                shard = Float8Shard(weight.detach(), scale)
            module.register_parameter("weight", nn.Parameter(shard, weight.requires_grad))
            module.register_state_dict_post_hook(_unwrap)
            module.register_load_state_dict_post_hook(updater.changes.mark)
    hooks: list[Any] = []

    def check(*_: object) -> None:
        hooks.pop().remove()  # at the first forward pass only
        require_wrapped(model)

    hooks.append(model.register_forward_pre_hook(check))


def require_wrapped(model: nn.Module) -> None:
    """Raises if a weight is not wrapped. FSDP would all-gather it in high precision, without an error."""
    for name, module in model.named_modules():
        weight = module._parameters["weight"] if matmul_of(module) else None
        inner = weight._local_tensor if isinstance(weight, DTensor) else weight
        if inner is not None and not isinstance(inner, Float8Shard | Float8TrainingTensor):
            raise RuntimeError(
                f"{name}.weight was replaced after `wrap_weights`, and FSDP would all-gather it in high precision; add the "
                "operation that replaced it to `WRAPPED_OPERATIONS`, or wrap the weights after it"
            )


class ScaleUpdater:
    """Recomputes the scales of all wrapped weights of a model after the weights have changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights: list[DTensor] = []
        self.changes = WeightChanges()

    def update(self) -> None:
        """Recomputes the scales if they are stale."""
        if not self.changes.since_last():
            return
        if not self.weights:  # found before the first all-gather; later FSDP may swap in unsharded parameters
            parameters = [p for p in self.model.parameters() if isinstance(p, DTensor)]
            self.weights = [p for p in parameters if isinstance(p._local_tensor, Float8Shard)]
        for indices, amax in weight_maxima(self.weights):
            for index, scale in zip(indices, scale_of(amax, float8_dtype(WEIGHT)).unbind(), strict=True):
                cast(Float8Shard, self.weights[index]._local_tensor).weight_scale.scale = scale


def _unwrap(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Replaces a wrapped weight in a state dict by the high-precision one, which loads with or without float8."""
    weight = state[prefix + "weight"]
    if isinstance(weight, DTensor) and isinstance(weight._local_tensor, Float8Shard):
        state[prefix + "weight"] = DTensor(weight._local_tensor.stored, weight._spec, requires_grad=False)
    elif isinstance(weight, Float8Shard):
        state[prefix + "weight"] = weight.stored
