"""Mixed precision for parameters that are not sharded: FSDP's `param_dtype` without its unsharded copies."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.parallelisms.param_override import override_params
from titanlike.utils.compat import tree_map_only


def apply_compute_dtype(model: nn.Module, dtype: torch.dtype, *, cast_forward_inputs: bool = True) -> None:
    """Casts floating-point parameters to `dtype` in every module's forward pass. Parameters and gradients keep their own dtype.
    Modules with the attribute `casts_weight` are left as they are.

    Args:
        cast_forward_inputs: also casts the floating-point inputs of the model.
    """

    def cast(module: Any, name: str) -> Tensor:
        # Cast at each use: the compiler recomputes the cast in the backward pass instead of saving its result.
        parameter: Tensor = module._parameters[name]
        return parameter.to(dtype)

    cached_class: Any = cache(override_params)  # blocks of the same classes share one compiled forward
    for module in model.modules():
        parameters = module.named_parameters(recurse=False)
        names = tuple(name for name, p in parameters if p.dtype != dtype and p.is_floating_point())
        if names and not getattr(module, "casts_weight", False):
            module.__class__ = cached_class(type(module), names, cast)
    if cast_forward_inputs:

        def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

        model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
