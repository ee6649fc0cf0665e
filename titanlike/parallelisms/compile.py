"""torch.compile, one block at a time or the model as a whole."""

from typing import Any, Literal

import torch
from torch import nn


def apply_compile(
    model: nn.Module, blocks: nn.ModuleDict, *, mode: Literal["block", "model", "none"], backend: str = "inductor"
) -> None:
    """Compile `forward` in place: parameter names stay as they are, and FSDP's hooks stay outside the compiled code.

    Blocks are alike, so the code made for the first serves all. A graph break is an error, not a slow step.
    """
    targets = {"block": list(blocks.values()), "model": [model], "none": []}[mode]
    for module in targets:
        compiled: Any = torch.compile(module.forward, backend=backend, fullgraph=True)
        module.forward = compiled
