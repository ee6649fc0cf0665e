"""Substitutes parameters during the forward pass, for example by casts or by local shards."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def override_params(module_class: Any, names: Sequence[str], get_param: Callable[[Any, str], Tensor | None]) -> Any:
    """Returns a subclass whose `forward` reads `get_param(module, name)` for each of the named parameters."""

    class ParamOverride(module_class):  # type: ignore[misc]
        in_forward = False

        def forward(self, *inputs: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return super().forward(*inputs, **named)
            self.in_forward = True
            try:
                return super().forward(*inputs, **named)
            finally:  # checkpoint stops a recomputation early by raising an exception
                self.in_forward = False

        def original_param(self, name: str) -> Tensor | None:
            """Returns the registered parameter."""
            return self._parameters[name] if name in self._parameters else getattr(super(), name, None)

    def overridden(name: str) -> property:
        def get(module: Any) -> Tensor | None:
            overrides = module.in_forward or torch.compiler.is_compiling()
            param: Tensor | None = get_param(module, name) if overrides else module.original_param(name)
            return param

        return property(get)

    for name in names:
        setattr(ParamOverride, name, overridden(name))
    ParamOverride.__name__ = ParamOverride.__qualname__ = module_class.__name__
    return ParamOverride
