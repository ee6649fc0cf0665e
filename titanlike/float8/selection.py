"""Selection and checks of the linear layers that are converted to float8, from their names and sizes. Does not import torch.

Sizes are of the full, unsharded matrix, so that every layout converts the same layers.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache

from titanlike.config.base import matches, one_of
from titanlike.config.sections import Float8
from titanlike.models.common.config import TransformerConfig

HEAD = "output"

# Matrix dimensions must be multiples of these: the alignment of the matmul kernels, and the block size of mxfp8.
ALIGNMENT = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16, "mxfp8": 32}


def skip_reasons(float8: Float8, matrices: Mapping[str, Sequence[int]], tied_head: bool) -> dict[str, str]:
    """Returns, for each matrix of size (outputs, inputs), why it is not converted; "" if it is."""
    return {name: _skip_reason(float8, name, *size, tied=tied_head) for name, size in matrices.items()}


@cache
def float8_names(float8: Float8, model: TransformerConfig) -> frozenset[str]:
    """Returns the full names of the matrices that multiply in float8."""
    if float8.scaling == "none" or float8.emulate:
        return frozenset()
    reasons = skip_reasons(float8, model.matrices(), model.tied_head)
    return frozenset(name for name, reason in reasons.items() if not reason)


@cache
def float8_layers(float8: Float8, model: TransformerConfig, index: int) -> frozenset[str]:
    """Returns the names of the float8 layers of a block, within the block; -1 is the last one."""
    prefix = f"layers.{index if index >= 0 else model.num_layers + index}."
    return frozenset(name.removeprefix(prefix) for name in float8_names(float8, model) if name.startswith(prefix))


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


@lru_cache  # the planner checks thousands of layouts of one model
def selection_problems(float8: Float8, model: TransformerConfig, tensor: int) -> tuple[str, ...]:
    """Returns a sentence for each pattern that matches no matrix, and for matrices that float8 cannot multiply."""
    matrices = model.matrices()
    parts = sorted({part for name in matrices for part in name.split(".") if not part.isdigit()})
    problems = []
    for key in ("layers", "skip"):
        for pattern in getattr(float8, key):
            if not any(matches(pattern, name) for name in matrices):
                near = difflib.get_close_matches(pattern.rpartition(".")[2], parts, 1)
                problems.append(
                    f"float8.{key}: {pattern!r} matches no matrix of this model ({', '.join(model.block_matrices())} in each of "
                    f"layers.0 to layers.{model.num_layers - 1}, and {HEAD})"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )
    reasons = skip_reasons(float8, matrices, model.tied_head)
    if all(reasons.values()) and not problems:
        problems.append(
            f"float8.scaling = {float8.scaling!r} has no matrix to convert: "
            + ("all are too small; set float8.layers = ['*'] to convert them anyway" if "too small" in reasons.values()
               else "float8.layers and float8.skip exclude all matrices of the blocks; change them, or set float8.head = true")
            + ", or float8.scaling = 'none'"
        )  # fmt: skip
    alignment, misaligned = ALIGNMENT[float8.scaling], dict[str, str]()
    for name, local in model.matrices(tensor).items():
        matrix = name.split(".", 2)[2] if name != HEAD else HEAD
        whole, part = math.prod(matrices[name]), math.prod(local)
        divides = part in (whole, whole / tensor)  # otherwise another check refuses it
        if not reasons[name] and divides and (local[0] % alignment or local[1] % alignment):
            misaligned[matrix] = f"{local[0]} x {local[1]}" + (f" on each of {tensor} ranks" if tensor > 1 else "")
    for matrix, size in misaligned.items():
        problems.append(
            f"float8.scaling = {float8.scaling!r} requires multiples of {alignment}, but {matrix} is {size}; change the model's "
            + ("sizes or parallelism.tensor" if tensor > 1 else "sizes")
            + f", or exclude it with float8.skip = [{matrix.rpartition('.')[2]!r}]"
        )
    return tuple(problems)


def token_problems(scaling: str, sequences: int, seq_len: int, context: int) -> Iterator[str]:
    """Yields a sentence if the number of tokens in a micro-batch, the inner dimension of weight gradients, is not aligned."""
    if scaling == "rowwise_with_gw_hp":
        return
    alignment, tokens = ALIGNMENT[scaling], sequences * seq_len // context
    if tokens % alignment:
        step = alignment * context // math.gcd(alignment * context, sequences)
        near = [n * step for n in (seq_len // step, seq_len // step + 1) if n]
        sizes = f"{sequences} x {seq_len}" + (f" / {context}" if context > 1 else "")
        yield (
            f"float8.scaling = {scaling!r} requires multiples of {alignment}, but a rank's micro-batch has {tokens} tokens "
            f"({sizes}); use training.seq_len = {one_of(near)}"
        )


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
