"""A module that sees its parameters otherwise while it computes: as casts, or as this rank's shares."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def seeing(kind: Any, names: Sequence[str], look: Callable[[Any, str], Tensor | None]) -> Any:
    """The same kind of module. In its forward pass, and only there, the named parameters are what `look(module, name)` gives."""

    class Seeing(kind):  # type: ignore[misc]
        computing = False

        def forward(self, *inputs: Any) -> Any:
            if torch.compiler.is_compiling():
                return super().forward(*inputs)
            self.computing = True
            try:
                return super().forward(*inputs)
            finally:  # a recomputation is cut short by an exception when it has what it wants
                self.computing = False

        def own(self, name: str) -> Tensor | None:
            """The parameter itself."""
            return self._parameters[name] if name in self._parameters else getattr(super(), name, None)

    def seen(name: str) -> property:
        def get(module: Any) -> Tensor | None:
            inside = module.computing or torch.compiler.is_compiling()
            found: Tensor | None = look(module, name) if inside else module.own(name)
            return found

        return property(get)

    for name in names:
        setattr(Seeing, name, seen(name))
    Seeing.__name__ = Seeing.__qualname__ = kind.__name__
    return Seeing
