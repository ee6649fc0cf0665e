"""Says in words what `comparison.py` found wrong first, and what usually causes that."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlike.tools.verify.comparison import (
    ACCUMULATED,
    BUFFERS,
    DROPOUT,
    GRADIENTS,
    INITIAL,
    INITIAL_BUFFERS,
    LOSS,
    NAME,
    NORM,
    OUTPUTS,
    PROPORTIONAL,
    STATE,
    WEIGHTS,
    WITH_DROPOUT,
    Comparison,
    Difference,
)

LOW_PRECISION = 2e-2  # largest relative difference that a sum in bfloat16 explains


@dataclass(frozen=True)
class Diagnosis:
    """The first phase that differs, its first tensor, and the usual cause."""

    comparison: Comparison
    first: Difference
    detail: str
    cause: str

    def __str__(self) -> str:
        return f"NOT equal: {self.comparison.title}: {self.detail}\nusual cause: {self.cause}"


def first_finding(
    comparisons: Sequence[Comparison], sizes: Mapping[str, int], batch_dimensions: Sequence[str]
) -> Diagnosis | None:
    """Returns what is wrong first, or None if all phases agree. `sizes` are the mesh's."""
    for comparison in comparisons:
        if comparison.wrong:
            first = comparison.wrong[0]
            cause = usual_cause(comparison, first, sizes, batch_dimensions)
            return Diagnosis(comparison, first, describe(comparison, first), cause)
    return None


def first_finding_of_compiled(comparisons: Sequence[Comparison]) -> Diagnosis | None:
    """Returns what is wrong first in compiled code, or None if it agrees with eager code."""
    for comparison in comparisons:
        if comparison.wrong:
            first = comparison.wrong[0]
            detail = describe(comparison, first, reference="eager code")
            return Diagnosis(comparison, first, detail, usual_cause_of_compiled(comparison, first))
    return None


def shown_factor(factor: float) -> str:
    """Returns a factor as a reader recognizes it: 2, 1/4, -1."""
    if abs(factor) < PROPORTIONAL:
        return "0"
    sign = "-" if factor < 0 else ""
    for number, prefix in ((abs(factor), ""), (1 / abs(factor), "1/")):
        whole = round(number)
        if 1 <= whole <= 4096 and abs(number - whole) < 2 * PROPORTIONAL * number:
            return f"{sign}{'' if whole == 1 else prefix}{whole}"
    return f"{factor:.4g}"


def describe(comparison: Comparison, first: Difference, reference: str = "one process") -> str:
    """Returns which tensor is wrong, by what factor, and how many others are."""
    kind = comparison.kind
    name = kind if kind in (LOSS, NORM) else first.name or "the output of the model"
    ranks = f"the ranks of {' x '.join(first.across)}"
    if NAME in first.across:
        ranks = "the modules that share it"
    if kind == DROPOUT:
        return f"the mask of {name} {first.problem} on {ranks}"
    if first.problem:
        detail = f"{name} {first.problem}"
    elif first.across:
        detail = f"{name} differs between {ranks}"
        detail += f"; the {first.combined} over them is that of {reference}" if first.combined else ""
    elif first.factor is not None:
        detail = f"{name} is {shown_factor(first.factor)} times that of {reference}"
    elif first.part:
        detail = f"{name} is wrong in {first.part}"
    else:
        detail = f"{name} is not proportional to that of {reference} (relative difference {first.size:.1e})"
    if kind in (LOSS, NORM):
        return detail
    if kind == OUTPUTS:
        return detail + ("; it is the first module whose output differs" if first.name else "")
    num_wrong, num_compared = len(comparison.wrong), comparison.num_compared
    num_alike = sum(_relation(each) == _relation(first) for each in comparison.wrong)
    if num_wrong > 1:
        which = f"all {num_compared}" if num_wrong == num_compared else f"{num_wrong} of {num_compared}"
        alike = ", in the same way" if num_alike == num_wrong else f", {num_alike} in this way" if num_alike > 1 else ""
        return f"{detail} ({which} are wrong{alike})"
    others = "the other one agrees" if num_compared == 2 else f"the other {num_compared - 1} agree"
    return f"{detail} ({others})" if num_compared > 1 else detail


def _relation(difference: Difference) -> tuple[object, ...]:
    factor = None if difference.factor is None else shown_factor(difference.factor)
    return factor, difference.across, difference.combined, difference.problem


def usual_cause(
    comparison: Comparison, first: Difference, sizes: Mapping[str, int], batch_dimensions: Sequence[str]
) -> str:
    """Returns what usually causes such a difference."""
    kind, step, across = comparison.kind, comparison.step, " x ".join(first.across)
    if kind in (INITIAL, INITIAL_BUFFERS):
        return _cause_of_initial(kind, first, across)
    if kind == OUTPUTS:
        return _cause_of_outputs(first, across, sizes)
    if kind == LOSS:
        if first.across:
            return f"each rank of {across} computes it from its own logits; combine their maximum, sum and target over {across}"
        if step > 1:
            return (
                "the weights agree, so the batch differs, or what a step leaves behind, such as a buffer or a counter"
            )
        return (
            "the outputs agree, so the loss combines them otherwise: a mean per rank over different numbers of tokens, labels "
            "shifted within each part of a sequence, or logits that count twice"
        )
    if kind == GRADIENTS:
        return _cause_of_gradients(comparison, first, across, sizes, batch_dimensions)
    if kind == NORM:
        if first.across:
            return f"each rank clips by the norm of its own gradients; sum the squares of shards over {across}"
        return (
            "the gradients agree, so their norm combines them otherwise: squares of replicated gradients are summed over the ranks "
            "that hold copies, or those of shards are not"
        )
    if kind == WEIGHTS:
        if first.across:
            return f"copies are updated otherwise: clipping, the optimizer or its state differs between the ranks of {across}"
        return (
            "the gradients agree, so the update differs: clipping, weight decay of other parameters, or an optimizer that treats a "
            "shard as the whole matrix"
        )
    if kind == STATE:
        return "the gradients agree, so the state is that of another parameter, or was not restored"
    if kind == BUFFERS:
        return "each rank updates the buffer from its own part of the batch or of the module; reduce it over the ranks"
    assert kind == DROPOUT
    if first.problem == "differs":
        return f"these ranks drop other elements of the same activation; seed the ranks of {across} alike"
    return f"these ranks have the same random state for different activations; add the rank along {across} to the seed"


def usual_cause_of_compiled(comparison: Comparison, first: Difference) -> str:
    """Returns what usually makes compiled code differ from eager code."""
    kind, step = comparison.kind, comparison.step
    if kind in (INITIAL, INITIAL_BUFFERS):
        return "what is applied together with compilation changes the weights"
    if kind == WITH_DROPOUT:
        if first.name == LOSS:
            return "with one random state, the compiled forward pass applies other masks than eager code"
        return (
            "without dropout they agree: the backward pass draws the mask of dropout again, and another one than the forward pass "
            "has applied"
        )
    if kind == ACCUMULATED:
        return (
            "the gradient of the first micro-batch agrees, and the second one overwrites it: compiled code, such as a CUDA graph, "
            "returns its gradients in the same memory at each call, which autograd has taken for .grad"
        )
    if step == 2:
        return (
            "step 1 agrees: the compiled code has the first weights, or another value of the first call, as a constant"
        )
    if step > 2:
        return "earlier steps agree: the code that is compiled again for another number of rows or length, or its guards, is wrong"
    if kind == OUTPUTS:
        return "a decomposition or a kernel of this module's forward pass computes something else"
    if kind == LOSS:
        return "the outputs agree, so the compiled loss computes something else"
    if kind == GRADIENTS:
        if first.part:
            return (
                "the backward pass does not write a part of it: gradients of its slices share one buffer, and a fused reduction "
                "misses theirs"
            )
        if first.factor is not None and shown_factor(first.factor) == "0":
            return "no gradient reaches it: the compiled graph detaches it, or returns its gradient in another place"
        if len(comparison.wrong) == comparison.num_compared > 1 and first.size < LOW_PRECISION:
            return "compiled code rounds to a lower precision than eager code"
        return "a decomposition, a recomputed value or a kernel of the backward pass is wrong"
    if kind == BUFFERS:
        return "compiled code updates the buffer another number of times, such as once more where the forward pass is recomputed"
    return "the gradients agree, so a compiled optimizer or hook computes something else"


def _cause_of_initial(kind: str, first: Difference, across: str) -> str:
    if first.problem.startswith("has the shape"):
        return "it is neither full nor an even shard of one dimension; use a DTensor, which knows its placement"
    if first.problem:
        return "the plan adds, renames or removes it, for example by replacing a tied weight"
    if kind == INITIAL_BUFFERS:
        return "it is computed after sharding, or left uninitialized when a module on the meta device is materialized"
    if first.across:
        return f"the ranks of {across} initialize their copies with different seeds; broadcast them, or seed alike"
    if first.part:
        return "shards are initialized with the same seed, so that each has the values of the first, or a shard is misplaced"
    return (
        "shards are initialized on their own, with a seed per rank or a scale computed from the size of the shard; initialize "
        "before sharding, or load the same checkpoint"
    )


def _cause_of_outputs(first: Difference, across: str, sizes: Mapping[str, int]) -> str:
    if first.across:
        return f"partial results are not all-reduced over {across}, or each rank computes with its own positions, masks or experts"
    if first.factor is not None and shown_factor(first.factor) in {str(size) for size in sizes.values()}:
        return f"an output that each rank has in full is summed over {shown_factor(first.factor)} ranks"
    if first.part.startswith("[:"):
        return "ranks use positions, masks or keys of their own part as if it were the whole sequence"
    if first.part:
        return "ranks read the same rows, or rows of another order, of the batch"
    return (
        "a bias that each rank adds before the all-reduce, a fused weight that is cut across its parts, or heads, experts or "
        "positions in another order"
    )


def _cause_of_gradients(
    comparison: Comparison,
    first: Difference,
    across: str,
    sizes: Mapping[str, int],
    batch_dimensions: Sequence[str],
) -> str:
    is_all = len(comparison.wrong) == comparison.num_compared > 1
    if NAME in first.across:
        return "a tied weight that ranks hold copies of; sum the gradients of its uses over the ranks that hold them"
    if first.across:
        if not first.combined:
            return f"it is replicated over {across}, and ranks reduce it in different orders, over different groups, or not at all"
        parts = "batch" if set(first.across) <= set(batch_dimensions) else "tokens, heads or experts"
        how = "sum it" if first.combined == "sum" else "average it"
        return f"it is replicated over {across}, and each rank has the gradient of its own part of the {parts}: {how} over {across}"
    if first.factor is not None:
        return _cause_of_factor(first.factor, is_all, sizes, batch_dimensions)
    if is_all and first.size < LOW_PRECISION:
        return "gradients are reduced or accumulated in low precision"
    if first.part:
        return "the gradient of a part of it is lost or added twice, of some ranks, experts or tokens"
    if is_all:
        return (
            "ranks or micro-batches are weighted otherwise, such as by a mean per rank over different numbers of tokens, or the "
            "loss gathers without a backward"
        )
    return (
        "the gradient of an activation is not reduced in the backward pass of a later layer, a gather has no backward, an "
        "auxiliary loss is scaled otherwise, or a hook reduces again what earlier micro-batches accumulated"
    )


def _cause_of_factor(factor: float, is_all: bool, sizes: Mapping[str, int], batch_dimensions: Sequence[str]) -> str:
    shown = shown_factor(factor)
    data = math.prod(sizes.get(each, 1) for each in batch_dimensions)
    if shown == "0":
        return "no gradient reaches it: a collective without a backward, a detached tensor, or a frozen parameter"
    if shown == "-1":
        return "the sign of the loss or of a custom backward is wrong"
    if data > 1 and shown == str(data):
        return (
            f"it is summed over the {data} ranks that share the batch, while the loss of each is a mean over its part: average it, "
            "or divide the loss by the global number of tokens"
            if is_all
            else f"it has the contributions of all {data} ranks that share the batch, like that of an expert: divide it by {data}"
        )
    if data > 1 and shown == f"1/{data}":
        return (
            f"it is divided by {data} twice: by FSDP or DDP, which average, and by a loss over the tokens of all ranks"
        )
    for dimension, size in sizes.items():
        if size > 1 and shown == str(size):
            return f"a gradient that each rank of {dimension} already has in full is summed over {dimension}, or scaled by its size"
        if size > 1 and shown == f"1/{size}":
            return f"it is averaged over {dimension}, where the ranks have parts of it that have to be summed"
    if is_all and factor > 1 and "." not in shown:
        return f"{shown} micro-batches are accumulated without dividing their losses by {shown}"
    return "its loss is scaled twice, or by a number that depends on the layout"
