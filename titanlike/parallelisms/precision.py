"""Mixed precision for parameters that are not sharded: FSDP's `param_dtype` without its unsharded copies."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.parallelisms.param_override import override_params


def apply_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters to `dtype` in every module's forward pass. Parameters and gradients keep their own dtype."""

    def cast(module: Any, name: str) -> Tensor:
        # Cast at each use: the compiler recomputes the cast in the backward pass instead of saving its result.
        parameter: Tensor = module._parameters[name]
        return parameter.to(dtype)

    cached_class: Any = cache(override_params)  # blocks of the same classes share one compiled forward
    for module in model.modules():
        names = tuple(name for name, p in module.named_parameters(recurse=False) if p.dtype != dtype)
        if names:
            module.__class__ = cached_class(type(module), names, cast)
