"""What float8 cannot do, said of a recipe before anything starts. No torch."""

import difflib
import math

from titanlike.config import PretrainRecipe
from titanlike.config.base import one_of
from titanlike.config.sections import Float8
from titanlike.float8.selection import GRAIN, HEAD, names, select


def float8_problems(recipe: PretrainRecipe) -> list[str]:
    """What float8 does not go with, and matrices that it cannot multiply."""
    float8, model, tensor = recipe.float8, recipe.model, recipe.parallelism.tensor
    if float8.scaling == "none":
        idle = [name for name in Float8.__dataclass_fields__ if getattr(float8, name) != getattr(Float8(), name)]
        given = f"float8.{' and float8.'.join(idle)} {'is' if len(idle) == 1 else 'are'} set"
        remedy = f"set float8.scaling = 'tensorwise', or leave {'it' if len(idle) == 1 else 'them'} out"
        return [f"{given}, but float8.scaling = 'none' turns float8 off; {remedy}"] if idle else []
    problems = []
    if float8.all_gather and float8.scaling != "tensorwise":
        problems.append(
            f"float8.all_gather = true wants one scale for a whole matrix, but float8.scaling = {float8.scaling!r} has many; "
            "set float8.scaling = 'tensorwise', or all_gather = false"
        )
    if float8.all_gather and recipe.parallelism.cpu_offload:
        problems.append(
            "float8.all_gather = true does not go with parallelism.cpu_offload = true: it finds its scales on the GPU; "
            "set one of them false"
        )
    if float8.head and model.tied_head:
        problems.append(
            "float8.head = true, but the head of this model is the embedding's table, which stays as it is; set it false"
        )
    matrices = model.matrices()
    unmatched = [
        (key, pattern)
        for key in ("layers", "skip")
        for pattern in getattr(float8, key)
        if not any(names(pattern, name) for name in matrices)
    ]
    parts = sorted({part for name in matrices for part in name.split(".") if not part.isdigit()})
    for key, pattern in unmatched:
        near = difflib.get_close_matches(pattern.rpartition(".")[2], parts, 1)
        problems.append(
            f"float8.{key}: {pattern!r} names no matrix of this model ({', '.join(model.block_matrices())} in each of layers.0 to "
            f"layers.{model.num_layers - 1}, and {HEAD})" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    chosen = [name for name, reason in select(float8, matrices, model.tied_head).items() if not reason]
    if not chosen and not unmatched:
        small = any(reason == "too small to gain" for reason in select(float8, matrices, model.tied_head).values())
        problems.append(
            f"float8.scaling = {float8.scaling!r} has no matrix to convert: "
            + ("all are too small to gain; set float8.skip_small = false to convert them all the same" if small
               else "float8.layers and float8.skip leave none of the blocks'; change them, or set float8.head = true")
            + ", or float8.scaling = 'none'"
        )  # fmt: skip
    grain, odd = GRAIN[float8.scaling], dict[str, str]()
    for name in chosen:
        outputs, inputs = matrices[name]
        kind = name.split(".", 2)[2] if name != HEAD else HEAD
        mine = (outputs, inputs // tensor) if kind in recipe.model.rowwise_matrices else (outputs // tensor, inputs)
        even = mine[0] * mine[1] * tensor == outputs * inputs  # else it is refused for that
        if even and (mine[0] % grain or mine[1] % grain):
            odd[kind] = f"{mine[0]} x {mine[1]}" + (f" on each of {tensor} ranks" if tensor > 1 else "")
    problems += [
        f"float8.scaling = {float8.scaling!r} multiplies in pieces of {grain}, but {kind} is {size}; change the model's sizes"
        + (" or parallelism.tensor" if tensor > 1 else "")
        + f", or leave it as it is with float8.skip = [{kind.rpartition('.')[2]!r}]"
        for kind, size in odd.items()
    ]
    return problems


def hardware_problems(float8: Float8, device: str, capability: tuple[int, int] | None) -> list[str]:
    """Whether a device of this compute capability, None for a CPU, has what the recipe wants."""
    oldest, kind = ((10, 0), "Blackwell") if float8.scaling == "mxfp8" else ((8, 9), "Ada, Hopper, Blackwell")
    if float8.scaling == "none" or float8.emulate or (capability or (0, 0)) >= oldest:
        return []
    found = "has no float8" if capability is None else f"is of {capability[0]}.{capability[1]}"
    return [
        f"float8.scaling = {float8.scaling!r} wants a GPU of compute capability {oldest[0]}.{oldest[1]} or later ({kind}), but "
        f"{device} {found}; set float8.scaling = 'none', or float8.emulate = true to see here, slowly, what it does to the loss"
    ]


def token_problems(recipe: PretrainRecipe, sequences: int) -> list[str]:
    """Gradients of weights are sums over the tokens that a rank has at once, which are multiplied in pieces too."""
    scaling, context = recipe.float8.scaling, recipe.parallelism.context
    if scaling in ("none", "rowwise_with_gw_hp"):
        return []
    grain, tokens = GRAIN[scaling], sequences * recipe.training.seq_len // context
    if tokens % grain == 0:
        return []
    step = grain * context // math.gcd(grain * context, sequences)
    near = [n * step for n in (recipe.training.seq_len // step, recipe.training.seq_len // step + 1) if n]
    return [
        f"float8.scaling = {scaling!r} multiplies in pieces of {grain}, but a rank takes {tokens} tokens at once ({sequences} x "
        f"{recipe.training.seq_len}"
        + (f" / {context}" if context > 1 else "")
        + f"); use training.seq_len = {one_of(near)}"
    ]
