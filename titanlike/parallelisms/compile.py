"""torch.compile, applied to each block."""

from typing import Any

import torch

from titanlike.parallelisms.blocks import Blocks, list_blocks


def apply_compile(blocks: Blocks, *, backend: str = "inductor", fullgraph: bool = True) -> None:
    """Compiles `forward` of each block in place: parameter names do not change, and FSDP hooks stay outside the compiled code.

    Blocks of the same structure share the code compiled for the first one.

    Args:
        fullgraph: whether a graph break raises an error. Otherwise, what the compiler does not support runs as it is.
    """
    for block in list_blocks(blocks):
        compiled: Any = torch.compile(block.forward, backend=backend, fullgraph=fullgraph)
        block.forward = compiled
