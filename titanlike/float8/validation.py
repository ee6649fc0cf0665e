"""Validation of float8 settings against the model, the layout and the hardware. Does not import torch."""

import difflib
import math
from functools import lru_cache

from titanlike.config import PretrainRecipe
from titanlike.config.base import matches, one_of
from titanlike.config.sections import Float8
from titanlike.float8.selection import ALIGNMENT, HEAD, skip_reasons
from titanlike.models.base_config import TransformerConfig


def float8_problems(recipe: PretrainRecipe) -> list[str]:
    """Returns conflicting settings, patterns that match no matrix, and matrices that float8 cannot multiply."""
    float8, model = recipe.float8, recipe.model
    if float8.scaling == "none":
        unused = [name for name in Float8.__dataclass_fields__ if getattr(float8, name) != getattr(Float8(), name)]
        verb, pronoun = ("is", "it") if len(unused) == 1 else ("are", "them")
        return [
            f"float8.{' and float8.'.join(unused)} {verb} set, but float8.scaling = 'none' turns float8 off; "
            f"set float8.scaling = 'tensorwise', or remove {pronoun}"
        ] if unused else []  # fmt: skip
    checks = [
        (
            float8.all_gather and float8.scaling != "tensorwise",
            f"float8.all_gather = true requires one scale per matrix, but float8.scaling = {float8.scaling!r} has many; "
            "set float8.scaling = 'tensorwise', or all_gather = false",
        ),
        (
            float8.all_gather and recipe.parallelism.cpu_offload,
            "float8.all_gather = true does not support parallelism.cpu_offload = true: it computes scales on the GPU; "
            "set one of them false",
        ),
        (
            float8.head and model.tied_head,
            "float8.head = true, but the head of this model is tied to the embedding, which is not converted; set it false",
        ),
    ]
    return [
        *(problem for applies, problem in checks if applies),
        *_selection_problems(float8, model, recipe.parallelism.tensor),
    ]


@lru_cache  # the planner checks thousands of layouts of one model
def _selection_problems(float8: Float8, model: TransformerConfig, tensor: int) -> list[str]:
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
            + ("all are too small; set float8.skip_small = false to convert them anyway" if "too small" in reasons.values()
               else "float8.layers and float8.skip exclude all matrices of the blocks; change them, or set float8.head = true")
            + ", or float8.scaling = 'none'"
        )  # fmt: skip
    alignment, misaligned = ALIGNMENT[float8.scaling], dict[str, str]()
    for name, (outputs, inputs) in matrices.items():
        matrix = name.split(".", 2)[2] if name != HEAD else HEAD
        local = (outputs, inputs // tensor) if matrix in model.rowwise_matrices else (outputs // tensor, inputs)
        divides = local[0] * local[1] * tensor == outputs * inputs  # otherwise another check refuses it
        if not reasons[name] and divides and (local[0] % alignment or local[1] % alignment):
            misaligned[matrix] = f"{local[0]} x {local[1]}" + (f" on each of {tensor} ranks" if tensor > 1 else "")
    return problems + [
        f"float8.scaling = {float8.scaling!r} requires multiples of {alignment}, but {matrix} is {size}; change the model's sizes"
        + (" or parallelism.tensor" if tensor > 1 else "")
        + f", or exclude it with float8.skip = [{matrix.rpartition('.')[2]!r}]"
        for matrix, size in misaligned.items()
    ]


def hardware_problems(float8: Float8, device: str, capability: tuple[int, int] | None) -> list[str]:
    """Returns a problem if a device of this compute capability (None: a CPU) does not support the scaling."""
    minimum, names = ((10, 0), "Blackwell") if float8.scaling == "mxfp8" else ((8, 9), "Ada, Hopper, Blackwell")
    if float8.scaling == "none" or float8.emulate or (capability or (0, 0)) >= minimum:
        return []
    actual = "has no float8" if capability is None else f"has {capability[0]}.{capability[1]}"
    return [
        f"float8.scaling = {float8.scaling!r} requires a GPU of compute capability {minimum[0]}.{minimum[1]} or later ({names}), "
        f"but {device} {actual}; set float8.scaling = 'none', or float8.emulate = true to measure its effect on the loss (slow)"
    ]


def token_problems(recipe: PretrainRecipe, sequences: int) -> list[str]:
    """Returns a problem if the number of tokens in a micro-batch, the inner dimension of weight gradients, is not aligned."""
    scaling, context, seq_len = recipe.float8.scaling, recipe.parallelism.context, recipe.training.seq_len
    if scaling in ("none", "rowwise_with_gw_hp"):
        return []
    alignment, tokens = ALIGNMENT[scaling], sequences * seq_len // context
    if tokens % alignment == 0:
        return []
    step = alignment * context // math.gcd(alignment * context, sequences)
    nearest = [n * step for n in (seq_len // step, seq_len // step + 1) if n]
    sizes = f"{sequences} x {seq_len}" + (f" / {context}" if context > 1 else "")
    return [
        f"float8.scaling = {scaling!r} requires multiples of {alignment}, but a rank's micro-batch has {tokens} tokens ({sizes}); "
        f"use training.seq_len = {one_of(nearest)}"
    ]
