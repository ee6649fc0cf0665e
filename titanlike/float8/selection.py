"""Selection of the linear layers that are converted to float8, from their names and sizes. Does not import torch.

Sizes are those of the full, unsharded matrix, so that every layout converts the same layers.
"""

from collections.abc import Mapping, Sequence

from titanlike.config.base import matches
from titanlike.config.sections import Float8

HEAD = "output"

# Matrix dimensions must be multiples of these: the alignment of the matmul kernels, and the block size of mxfp8.
ALIGNMENT = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16, "mxfp8": 32}


def skip_reasons(float8: Float8, matrices: Mapping[str, Sequence[int]], tied_head: bool) -> dict[str, str]:
    """Returns, for each matrix of size (outputs, inputs), why it is not converted; "" if it is."""
    return {name: _skip_reason(float8, name, *size, tied=tied_head) for name, size in matrices.items()}


def summary_lines(
    float8: Float8, matrices: Mapping[str, Sequence[int]], tied_head: bool, *, compiled: bool, sharded: bool
) -> list[str]:
    """Returns the start-up summary: the scaling, converted and skipped matrices, and warnings about slow settings."""
    if float8.scaling == "none":
        return []
    all_gather = "weights are all-gathered in float8" if sharded else "weights are not sharded: no all-gather"
    lines = [f"float8  {float8.scaling}" + (f"; {all_gather}" if float8.all_gather else "")]
    by_reason: dict[str, dict[str, list[str]]] = {"": {}}  # reason -> matrix -> blocks
    for name, reason in skip_reasons(float8, matrices, tied_head).items():
        _, block, matrix = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
        by_reason.setdefault(reason, {}).setdefault(matrix, []).append(block)
    num_blocks = len({name.split(".")[1] for name in matrices if name.startswith("layers.")})
    for reason, blocks_of in by_reason.items():
        parts = [
            matrix if blocks == [""] or len(blocks) == num_blocks else f"{matrix} of block {', '.join(blocks)}"
            for matrix, blocks in blocks_of.items()
        ]
        if parts:
            verdict, suffix = ("skipped", f" ({reason})") if reason else ("converted", "")
            lines.append(f"          {verdict}: {', '.join(parts)}{suffix}")
    if float8.emulate:
        lines.append("          EMULATED: casts to float8 and multiplies in float32, slower than without float8")
    elif not compiled:
        lines.append("          NOT COMPILED: casts cost more than float8 saves; set compile.mode = 'block'")
    return lines


def _skip_reason(float8: Float8, name: str, outputs: int, inputs: int, *, tied: bool) -> str:
    if name == HEAD and not float8.head:
        return "the head; float8.head is false"
    if name == HEAD and tied:
        return "the head is tied to the embedding"
    named = name == HEAD or any(matches(pattern, name) for pattern in float8.layers)
    if float8.layers and not named:
        return "not in float8.layers"
    if any(matches(pattern, name) for pattern in float8.skip):
        return "in float8.skip"
    if not named and _is_small(float8.scaling, outputs, inputs):
        return "too small"
    return ""


def _is_small(scaling: str, outputs: int, inputs: int) -> bool:
    """Whether casts cost more than the matmul saves, by torchao's thresholds, measured on an H100. Finer scales cost more."""
    if scaling == "tensorwise":
        return inputs <= 4096 and outputs <= 1024
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
