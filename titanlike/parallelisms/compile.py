"""torch.compile, applied to each block or to the full model."""

from typing import Any, Literal

import torch
from torch import nn

from titanlike.parallelisms.blocks import Blocks, check_choice, list_blocks


def apply_compile(
    model: nn.Module,
    blocks: Blocks,
    *,
    mode: Literal["block", "model", "none"],
    backend: str = "inductor",
    fullgraph: bool = True,
) -> None:
    """Compiles `forward` in place: parameter names do not change, and FSDP hooks stay outside the compiled code.

    Blocks of the same structure share the code compiled for the first one.

    Args:
        blocks: what `mode` "block" compiles, one by one. "model" compiles the whole model.
        fullgraph: whether a graph break raises an error. Otherwise, what the compiler does not support runs as it is.
    """
    check_choice("mode", mode, ("block", "model", "none"))
    targets = {"block": list_blocks(blocks), "model": [model], "none": []}[mode]
    for module in targets:
        compiled: Any = torch.compile(module.forward, backend=backend, fullgraph=fullgraph)
        module.forward = compiled
