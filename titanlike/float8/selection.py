"""Which matrices are multiplied in float8, and why the others are not: from names and sizes alone. No torch.

Sizes are those of the whole matrix, however many ranks share it: every layout converts the same ones.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from titanlike.config.sections import Float8

HEAD = "output"

# The hardware multiplies in pieces of so many numbers; mxfp8 shares scales over 32.
GRAIN = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16, "mxfp8": 32}


def select(float8: Float8, matrices: Mapping[str, Sequence[int]], tied_head: bool) -> dict[str, str]:
    """For each matrix of a model, by name and as (outputs, inputs), why it stays as it is; "" if it becomes float8."""
    return {name: _why_not(float8, name, *size, tied=tied_head) for name, size in matrices.items()}


def names(pattern: str, matrix: str) -> bool:
    """Whether a pattern, such as `wq` or `layers.*.attention`, names a part of the matrix's dotted name."""
    return fnmatchcase(f".{matrix}.", f"*.{pattern}.*")


def summary(verdicts: Mapping[str, str]) -> list[str]:
    """Which matrices are converted, and which are not for what reason: a line each, blocks that are alike told once."""
    reasons: dict[str, dict[str, list[str]]] = {}  # reason -> matrix -> blocks
    for name, reason in verdicts.items():
        layer, _, matrix = name.removeprefix("layers.").partition(".") if name.startswith("layers.") else ("", "", name)
        reasons.setdefault(reason, {}).setdefault(matrix, []).append(layer)
    num_layers = len({name.split(".")[1] for name in verdicts if name.startswith("layers.")})
    lines = []
    for reason, matrices in sorted(reasons.items(), key=lambda item: item[0] != ""):
        parts = [
            matrix if layers == [""] or len(layers) == num_layers else f"{matrix} of block {', '.join(layers)}"
            for matrix, layers in matrices.items()
        ]
        lines.append(
            f"{'as it was' if reason else 'converted'}: {', '.join(parts)}" + (f" ({reason})" if reason else "")
        )
    return lines


def summary_lines(
    float8: Float8, matrices: Mapping[str, Sequence[int]], tied_head: bool, *, compiled: bool, sharded: bool
) -> list[str]:
    """What to tell at the start: how, which matrices, which not, and what is slow."""
    if float8.scaling == "none":
        return []
    gathered = "weights are gathered in float8" if sharded else "weights are not sharded: nothing is gathered"
    lines = [f"float8  {float8.scaling}" + (f"; {gathered}" if float8.all_gather else "")]
    lines += [f"          {line}" for line in summary(select(float8, matrices, tied_head))]
    if float8.emulate:
        lines.append("          EMULATED: rounded to float8 and multiplied in float32, slower than without float8")
    elif not compiled:
        lines.append(
            "          NOT COMPILED: the casts alone take longer than float8 saves; set compile.mode = 'block'"
        )
    return lines


def _why_not(float8: Float8, name: str, outputs: int, inputs: int, *, tied: bool) -> str:
    if name == HEAD and not float8.head:
        return "the head; float8.head is false"
    if name == HEAD and tied:
        return "the head is the embedding's table"
    if name != HEAD and float8.layers and not any(names(pattern, name) for pattern in float8.layers):
        return "not in float8.layers"
    if any(names(pattern, name) for pattern in float8.skip):
        return "in float8.skip"
    if float8.skip_small and _is_small(float8.scaling, outputs, inputs):
        return "too small to gain"
    return ""


def _is_small(scaling: str, outputs: int, inputs: int) -> bool:
    """Where the product gains less than the casts cost. The bounds are torchao's, from its measurements on an H100; finer
    scales cost more to find."""
    if scaling == "tensorwise":
        return inputs <= 4096 and outputs <= 1024
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
