"""Mixed precision where nothing is sharded: what FSDP does for ranks that share weights, without its copies of them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def apply_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every module compute with its parameters in `dtype`. They stay what they are, and so do their gradients."""
    casting: Any = cache(_casting)  # a class for all modules alike, so that one compiled block serves all
    for module in model.modules():
        names = tuple(name for name, p in module.named_parameters(recurse=False) if p.dtype != dtype)
        if names:
            module.__class__ = casting(type(module), names, dtype)


def _casting(kind: Any, names: tuple[str, ...], dtype: torch.dtype) -> type:
    """The same kind of module. While it computes, and only then, it sees its parameters in `dtype`."""

    class Casting(kind):  # type: ignore[misc]
        computing = False

        def forward(self, *inputs: Any) -> Any:
            if torch.compiler.is_compiling():
                return super().forward(*inputs)
            self.computing = True
            try:
                return super().forward(*inputs)
            finally:  # a recomputation is cut short by an exception when it has what it wants
                self.computing = False

    def seen(name: str) -> property:
        def look(module: Any) -> Tensor:
            parameter: Tensor = module._parameters[name]
            # Made anew at each use: the compiler computes it again in the backward pass instead of keeping it.
            return parameter.to(dtype) if module.computing or torch.compiler.is_compiling() else parameter

        return property(look)

    for name in names:
        setattr(Casting, name, seen(name))
    Casting.__name__ = Casting.__qualname__ = kind.__name__
    return Casting
