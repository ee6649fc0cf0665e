"""Mixed precision where nothing is sharded: what FSDP does for ranks that share weights, without its copies of them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.parallelisms.param_override import seeing


def apply_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every module compute with its parameters in `dtype`. They stay what they are, and so do their gradients."""

    def cast(module: Any, name: str) -> Tensor:
        # Made anew at each use: the compiler computes it again in the backward pass instead of keeping it.
        parameter: Tensor = module._parameters[name]
        return parameter.to(dtype)

    casting: Any = cache(seeing)  # a class for all modules alike, so that one compiled block serves all
    for module in model.modules():
        names = tuple(name for name, p in module.named_parameters(recurse=False) if p.dtype != dtype)
        if names:
            module.__class__ = casting(type(module), names, cast)
