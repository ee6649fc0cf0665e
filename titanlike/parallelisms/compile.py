"""torch.compile, applied to each block."""

from typing import Any

import torch

from titanlike.parallelisms.blocks import Blocks, list_blocks
from titanlike.utils.compat import allow_recompilations, use_fast_exp


def apply_compile(
    blocks: Blocks, *, backend: str = "inductor", fullgraph: bool = True, static_shapes: bool = False
) -> None:
    """Compiles `forward` of each block in place: parameter names do not change, and FSDP hooks stay outside the compiled code.

    Blocks of the same structure share the code compiled for the first one. On GPUs, the compiler's kernels of this process compute
    exponentials with the instruction for them.

    Args:
        fullgraph: whether a graph break raises an error. Otherwise, what the compiler does not support runs as it is.
        static_shapes: compiles again for other shapes. Otherwise, code that is called with a second shape, or by a second model
            of other sizes, is compiled for any shape, which is slower, and which attention does not support.
    """
    use_fast_exp()
    if static_shapes:
        allow_recompilations()
    for block in list_blocks(blocks):
        dynamic = False if static_shapes else None
        compiled: Any = torch.compile(block.forward, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
        block.forward = compiled
