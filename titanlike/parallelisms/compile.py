"""torch.compile, applied to each block or to the full model."""

from typing import Any, Literal

import torch
from torch import nn


def apply_compile(
    model: nn.Module, blocks: nn.ModuleDict, *, mode: Literal["block", "model", "none"], backend: str = "inductor"
) -> None:
    """Compiles `forward` in place: parameter names do not change, and FSDP hooks stay outside the compiled code.

    Blocks of the same structure share the code compiled for the first one. A graph break raises an error.
    """
    targets = {"block": list(blocks.values()), "model": [model], "none": []}[mode]
    for module in targets:
        compiled: Any = torch.compile(module.forward, backend=backend, fullgraph=True)
        module.forward = compiled
