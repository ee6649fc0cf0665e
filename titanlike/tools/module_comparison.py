"""Compares what the ranks of a layout recorded of a module with what one process recorded: which tensor is wrong first, by what
factor, and what usually causes that. Needs no process group."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# What is compared, in the order in which a step computes it.
INITIAL, INITIAL_BUFFERS, OUTPUTS, LOSS = "initial weights", "initial buffers", "outputs", "loss"
GRADIENTS, NORM, WEIGHTS, STATE = "gradients", "gradient norm", "weights", "optimizer state"
BUFFERS, DROPOUT = "buffers", "dropout"
KINDS = (INITIAL, INITIAL_BUFFERS, OUTPUTS, LOSS, GRADIENTS, NORM, WEIGHTS, STATE, BUFFERS, DROPOUT)
# Relative to the largest element of a tensor: float32 sums in another order, which an optimizer may amplify.
TOLERANCES = {
    INITIAL: 1e-6, INITIAL_BUFFERS: 1e-6, OUTPUTS: 1e-4, LOSS: 1e-5, GRADIENTS: 1e-4, NORM: 1e-4, WEIGHTS: 1e-4, STATE: 1e-3,
    BUFFERS: 1e-4,
}  # fmt: skip
SMALLEST = (
    1e-3  # a tensor with smaller elements is compared relative to this fraction of the largest element of its phase
)
PROPORTIONAL = 1e-3  # largest relative difference from a multiple

Phase = tuple[str, int]  # what is compared, and the step, or 0


@dataclass
class Record:
    """What one process computed. A tensor of a rank is full, or a shard of one dimension."""

    coordinates: dict[str, int] = field(default_factory=dict)  # of the rank in the mesh
    tensors: dict[Phase, dict[str, Tensor]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # modules, then parameters, in the order of their first use
    dropout_inputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from that of one process."""

    name: str
    size: float  # largest difference relative to the largest element
    factor: float | None = None  # the ranks have this multiple, which is the same on all of them
    across: tuple[str, ...] = ()  # dimensions of the mesh along which copies of the tensor differ
    combined: str = ""  # "sum" or "mean", if that of the copies along `across` is the tensor of one process
    rows: str = ""  # that are wrong, if others are not
    problem: str = ""  # in place of a difference


@dataclass(frozen=True)
class Comparison:
    """A phase: the number of tensors, the largest difference, and those above the tolerance in the order in which errors spread."""

    kind: str
    step: int
    num_compared: int
    worst: float
    wrong: tuple[Difference, ...] = ()
    num_skipped: int = 0  # whose shape under the layout is neither full nor a shard

    @property
    def title(self) -> str:
        return f"{self.kind}, step {self.step}" if self.step else self.kind


@dataclass(frozen=True)
class Finding:
    """The first phase that differs."""

    comparison: Comparison
    first: Difference
    detail: str
    cause: str

    def __str__(self) -> str:
        return f"NOT equal: {self.comparison.title}: {self.detail}\nusual cause: {self.cause}"


def compare(
    one: Record,
    ranks: Sequence[Record],
    batch_dimensions: Sequence[str] = (),
    tolerances: Mapping[str, float] = TOLERANCES,
) -> list[Comparison]:
    """Compares all phases, in the order in which they were computed."""
    phases = sorted(
        {phase for record in (one, *ranks) for phase in record.tensors}, key=lambda phase: _when(phase, KINDS)
    )
    found = []
    for kind, step in phases:
        if kind == DROPOUT:
            found.append(_compare_dropout(ranks))
        elif kind == LOSS:
            found.append(_compare_loss(one, ranks, step, batch_dimensions, tolerances[LOSS]))
        else:
            found.append(_compare_tensors(one, ranks, kind, step, tolerances[kind]))
    return found


def first_finding(
    comparisons: Sequence[Comparison], sizes: Mapping[str, int], batch_dimensions: Sequence[str]
) -> Finding | None:
    """Returns what is wrong first, or None if all phases agree."""
    for comparison in comparisons:
        if comparison.wrong:
            first = comparison.wrong[0]
            return Finding(
                comparison,
                first,
                _describe(comparison, first),
                usual_cause(comparison, first, sizes, batch_dimensions),
            )
    return None


def _when(phase: Phase, kinds: Sequence[str]) -> tuple[int, int, int]:
    kind, step = phase
    is_last = kind in (BUFFERS, DROPOUT)
    return (2 if is_last else 1 if step else 0, step, kinds.index(kind))


def _compare_tensors(one: Record, ranks: Sequence[Record], kind: str, step: int, tolerance: float) -> Comparison:
    expected = one.tensors.get((kind, step), {})
    found = [record.tensors.get((kind, step), {}) for record in ranks]
    names = [*expected, *sorted({name for tensors in found for name in tensors} - expected.keys())]
    scale = SMALLEST * max((_largest(tensor) for tensor in expected.values()), default=0.0)
    differences: list[Difference] = []
    num_skipped = 0
    sizes_of: dict[str, float] = {}
    for name in names:
        here = [
            (record.coordinates, tensors[name]) for record, tensors in zip(ranks, found, strict=True) if name in tensors
        ]
        if name not in expected:
            differences.append(Difference(name, math.inf, problem="exists under the layout only"))
        elif not here:
            if kind == OUTPUTS:
                num_skipped += 1
            else:
                differences.append(Difference(name, math.inf, problem="exists in one process only"))
        else:
            difference = difference_of(name, expected[name], here, scale, tolerance, kind == OUTPUTS)
            if difference is None:
                num_skipped += 1
                continue
            sizes_of[name] = difference.size
            if not difference.size <= tolerance:
                differences.append(difference)
    worst = max(sizes_of.values(), default=0.0)
    if kind == OUTPUTS:
        # Only the output of the model itself must agree. Those of its modules say where an error begins.
        worst = sizes_of.get("", 0.0)
        differences = differences if worst > tolerance else []
    position = {name: number for number, name in enumerate(one.order)}
    sign = -1 if kind == GRADIENTS else 1  # the backward pass starts at the end of the network
    differences.sort(key=lambda difference: sign * position.get(difference.name.partition(": ")[0], len(position)))
    return Comparison(kind, step, len(names) - num_skipped, worst, tuple(differences), num_skipped)


def difference_of(
    name: str,
    expected: Tensor,
    found: Sequence[tuple[Mapping[str, int], Tensor]],
    scale: float,
    tolerance: float,
    guess: bool = False,
) -> Difference | None:
    """Compares a tensor of one process with those of the ranks, each with the rank's coordinates.

    Shards are concatenated along the dimensions that give the full shape. Of several ways, the one that agrees best counts. Returns
    None if there is none and `guess`, for tensors that need not be comparable.
    """
    candidates = [copies for copies in _assembled(expected.shape, found) if copies]
    if not candidates:
        if guess:
            return None
        shape = tuple(found[0][1].shape)
        return Difference(name, math.inf, problem=f"has the shape {shape}, in one process {tuple(expected.shape)}")
    reference = expected.double()
    size = max(_largest(expected), scale)

    def relative(tensor: Tensor) -> float:
        value = (tensor.double() - reference).abs().max().item() if tensor.numel() else 0.0
        return (value / size if size else math.inf if value else 0.0) if math.isfinite(value) else math.inf

    def worst(copies: list[tuple[Mapping[str, int], Tensor]]) -> float:
        return max(relative(tensor) for _, tensor in copies)

    copies = min(candidates, key=worst)
    value = worst(copies)
    if value <= tolerance:
        return Difference(name, value)
    tensors = [tensor.double() for _, tensor in copies]
    across = tuple(
        dimension
        for dimension in copies[0][0]
        if any(
            (a - b).abs().max().item() > tolerance * size
            for (at, a), (to, b) in itertools.combinations(copies, 2)
            if all((at[other] == to[other]) != (other == dimension) for other in at)
        )
    )
    if across:
        return Difference(name, value, across=across, combined=_combined(copies, across, reference, tolerance * size))
    return Difference(
        name, value, _multiple(tensors[0], reference, size), rows=_wrong_rows(tensors[0], reference, tolerance * size)
    )


def _assembled(
    shape: torch.Size, found: Sequence[tuple[Mapping[str, int], Tensor]]
) -> Iterator[list[tuple[Mapping[str, int], Tensor]]]:
    """Yields copies of the full tensor with the coordinates of their ranks: once for each way to concatenate shards."""
    dimensions = list(found[0][0])
    sizes = {each: len({at[each] for at, _ in found}) for each in dimensions}
    choices = [[None, *(range(len(shape)) if sizes[each] > 1 else ())] for each in dimensions]
    for choice in itertools.product(*choices):
        lengths = list(found[0][1].shape)
        if len(lengths) != len(shape):
            return
        for dimension, axis in zip(dimensions, choice, strict=True):
            if axis is not None:
                lengths[axis] *= sizes[dimension]
        if lengths != list(shape):
            continue
        copies = list(found)
        for dimension, axis in reversed(list(zip(dimensions, choice, strict=True))):
            if axis is None:
                continue
            groups: dict[tuple[tuple[str, int], ...], list[tuple[int, Tensor]]] = {}
            for at, tensor in copies:
                key = tuple((other, number) for other, number in at.items() if other != dimension)
                groups.setdefault(key, []).append((at[dimension], tensor))
            copies = [
                (dict(key), torch.cat([tensor for _, tensor in sorted(group, key=lambda each: each[0])], axis))
                for key, group in groups.items()
            ]
        if all(tensor.shape == shape for _, tensor in copies):
            yield copies


def _largest(tensor: Tensor) -> float:
    value = tensor.abs().max().item() if tensor.numel() else 0.0
    return value if math.isfinite(value) else 0.0


def _combined(
    copies: Sequence[tuple[Mapping[str, int], Tensor]], across: Sequence[str], expected: Tensor, allowed: float
) -> str:
    """Returns "sum" or "mean" if that of the copies along some dimensions is the expected tensor, otherwise an empty string."""
    others = [each for each in copies[0][0] if each not in across]
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for at, tensor in copies:
        groups.setdefault(tuple(at[other] for other in others), []).append(tensor.double())
    for name, count in (("sum", 1), ("mean", len(next(iter(groups.values()))))):
        totals = [torch.stack(group).sum(0) / count for group in groups.values()]
        if all((total - expected).abs().max().item() <= 10 * allowed for total in totals):
            return name
    return ""


def _multiple(found: Tensor, expected: Tensor, size: float) -> float | None:
    """Returns the factor if one tensor is a multiple of the other, otherwise None."""
    square = (expected * expected).sum().item()
    if not square or not math.isfinite(found.sum().item()):
        return None
    factor = (found * expected).sum().item() / square
    rest = (found - factor * expected).abs().max().item()
    return factor if rest <= PROPORTIONAL * size * max(1.0, abs(factor)) else None


def _wrong_rows(found: Tensor, expected: Tensor, allowed: float) -> str:
    """Returns the range of the rows that differ, if it is contiguous and others agree."""
    if found.ndim < 1 or len(found) < 2:
        return ""
    wrong = (
        ((found - expected).abs() > allowed).flatten(1).any(1) if found.ndim > 1 else (found - expected).abs() > allowed
    )
    rows = wrong.nonzero().flatten().tolist()
    if not rows or len(rows) == len(found) or rows[-1] - rows[0] + 1 != len(rows):
        return ""
    name = "row" if found.ndim > 1 else "element"
    return f"{name}{'s' if len(rows) > 1 else ''} {rows[0]}{f' to {rows[-1]}' if len(rows) > 1 else ''} of {len(found)}"


def _compare_loss(
    one: Record, ranks: Sequence[Record], step: int, batch_dimensions: Sequence[str], tolerance: float
) -> Comparison:
    """The mean over all ranks that have a loss must be that of one process, or the sum over the parts of the batch."""
    expected = float(one.tensors[LOSS, step]["loss"])
    values = [
        (r.coordinates, float(r.tensors[LOSS, step]["loss"]))
        for r in ranks
        if "loss" in r.tensors.get((LOSS, step), {})
    ]
    if not values:
        return Comparison(LOSS, step, 0, 0.0, num_skipped=1)
    parts = len({tuple(at.get(each, 0) for each in batch_dimensions) for at, _ in values})
    mean = sum(value for _, value in values) / len(values)
    size = max(abs(expected), 1e-6)

    def relative(value: float) -> float:
        return abs(value - expected) / size if math.isfinite(value) else math.inf

    worst = min(relative(mean), relative(mean * parts))
    if worst <= tolerance:
        return Comparison(LOSS, step, 1, worst)
    others = [each for each in values[0][0] if each not in batch_dimensions]
    across = tuple(
        dimension
        for dimension in others
        if any(
            abs(a - b) > tolerance * size
            for (at, a), (to, b) in itertools.combinations(values, 2)
            if all((at[other] == to[other]) != (other == dimension) for other in at)
        )
    )
    factor = mean / expected if expected and math.isfinite(mean) else None
    return Comparison(LOSS, step, 1, worst, (Difference("loss", worst, None if across else factor, across=across),))


def _compare_dropout(ranks: Sequence[Record]) -> Comparison:
    """Ranks with the same input must have the same mask, and those with different inputs different masks."""
    differences = []
    names = [
        name for name in ranks[0].tensors.get((DROPOUT, 0), {}) if all(name in r.tensors[DROPOUT, 0] for r in ranks)
    ]
    for name in names:
        for one, other in itertools.combinations(ranks, 2):
            masks = [each.tensors[DROPOUT, 0][name] for each in (one, other)]
            inputs = [each.dropout_inputs[name] for each in (one, other)]
            if masks[0].shape != masks[1].shape or masks[0].numel() < 32:
                continue
            is_copy = torch.allclose(inputs[0], inputs[1], rtol=1e-4, atol=1e-6)
            if is_copy == bool((masks[0] == masks[1]).all()):
                continue
            across = tuple(each for each, number in one.coordinates.items() if number != other.coordinates[each])
            problem = "differs" if is_copy else "is the same"
            differences.append(Difference(name.rpartition(" #")[0] or name, math.inf, across=across, problem=problem))
            break
    return Comparison(DROPOUT, 0, len(names), math.inf if differences else 0.0, tuple(differences))


def shown_factor(factor: float) -> str:
    """Returns a factor as a reader recognizes it: 2, 1/4, -1."""
    if abs(factor) < PROPORTIONAL:
        return "0"
    for number, text in ((factor, "{}"), (1 / factor, "1/{}")):
        if abs(number - round(number)) < 2e-3 * abs(number) and 1 <= abs(round(number)) <= 4096:
            whole = round(number)
            return str(whole) if text == "{}" or abs(whole) == 1 else f"{'-' if whole < 0 else ''}1/{abs(whole)}"
    return f"{factor:.4g}"


def _describe(comparison: Comparison, first: Difference) -> str:
    name = first.name or "the output of the model"
    if comparison.kind in (LOSS, NORM):
        name = comparison.kind
    if comparison.kind == DROPOUT:
        detail = f"the mask of {name} {first.problem} on the ranks of {' x '.join(first.across)}"
    elif first.problem:
        detail = f"{name} {first.problem}"
    elif first.across:
        detail = f"{name} differs between the ranks of {' x '.join(first.across)}"
        if first.combined:
            detail += f"; their {first.combined} is that of one process"
    elif first.factor is not None:
        detail = f"{name} is {shown_factor(first.factor)} times that of one process"
    else:
        detail = f"{name} is not proportional to that of one process"
        if math.isfinite(first.size):
            detail += f" (difference {first.size:.1e})"
    if first.rows:
        detail += f", in {first.rows}"
    num_wrong = len(comparison.wrong)
    if num_wrong > 1 and comparison.kind not in (LOSS, OUTPUTS):
        same = sum(_relation(each) == _relation(first) for each in comparison.wrong)
        which = "all" if num_wrong == comparison.num_compared else f"{num_wrong} of"
        detail += f" ({which} {comparison.num_compared} are wrong"
        detail += ", in the same way)" if same == num_wrong else f", {same} of them in this way)" if same > 1 else ")"
    elif num_wrong == 1 and comparison.num_compared > 1 and comparison.kind not in (LOSS, OUTPUTS):
        detail += f" (the other {comparison.num_compared - 1} agree)"
    if comparison.kind == OUTPUTS and any(each.name == "" for each in comparison.wrong) and first.name:
        detail = f"{detail}; it is the first module whose output differs"
    return detail


def _relation(difference: Difference) -> tuple[object, ...]:
    factor = None if difference.factor is None else shown_factor(difference.factor)
    return (factor, difference.across, difference.combined, difference.problem)


def usual_cause(
    comparison: Comparison, first: Difference, sizes: Mapping[str, int], batch_dimensions: Sequence[str]
) -> str:
    """Returns what usually causes such a difference."""
    data = math.prod(sizes.get(each, 1) for each in batch_dimensions)
    model = {each: size for each, size in sizes.items() if each not in batch_dimensions}
    is_all = len(comparison.wrong) == comparison.num_compared and comparison.num_compared > 1
    across = " x ".join(first.across)
    kind, factor = comparison.kind, None if first.factor is None else shown_factor(first.factor)
    if kind == DROPOUT:
        if first.problem == "differs":
            return f"these ranks drop other elements of the same activation; seed the ranks of {across} alike"
        return (
            f"these ranks have the same random state for different activations; add the rank along {across} to the seed"
        )
    if kind in (INITIAL, INITIAL_BUFFERS):
        return _cause_of_initial(kind, first, across)
    if kind == OUTPUTS:
        return _cause_of_outputs(first, factor, across, sizes)
    if kind == LOSS:
        if first.across:
            return f"each rank of {across} computes the loss from its own logits; combine their maximum, sum and target over {across}"
        if comparison.step > 1:
            return (
                "the weights agree, so the batches differ, or what a step leaves behind, such as a buffer or a counter"
            )
        return (
            "the outputs agree, so the loss combines them otherwise: a mean per rank over different numbers of tokens, labels that "
            "are shifted within a part of the sequence, or tokens that are counted twice"
        )
    if kind == GRADIENTS:
        return _cause_of_gradients(first, factor, across, is_all, data, model)
    if kind == NORM:
        if first.across:
            return f"each rank clips by the norm of its own gradients; sum the squares of shards over {across}"
        return (
            "the gradients agree, so their norm is combined otherwise: the squares of replicated gradients are summed over the "
            "ranks that hold copies, or those of shards are not"
        )
    if kind == WEIGHTS:
        if first.across:
            return f"copies of the weight are updated otherwise: optimizer, its state or clipping differ between the ranks of {across}"
        return (
            "the gradients agree, so the update differs: weight decay or frozen parameters by another rule, clipping, or an "
            "optimizer that treats a shard as the whole matrix"
        )
    if kind == STATE:
        return "the state of the optimizer is not that of the parameter: it was restored under another order, name or sharding"
    return "each rank updates the buffer from its own part of the batch or of the module; reduce it over the ranks"


def _cause_of_initial(kind: str, first: Difference, across: str) -> str:
    if kind == INITIAL_BUFFERS:
        return "the buffer is computed after sharding, or left uninitialized when a module on the meta device is materialized"
    if first.problem.startswith("has the shape"):
        return (
            "the parameter is neither full nor an even shard of one dimension; use a DTensor, which knows its placement"
        )
    if first.problem:
        return "the plan adds, renames or removes parameters, for example because it replaces a tied weight"
    if first.across:
        return f"the ranks of {across} initialize their copies with different seeds; broadcast them, or seed alike"
    if first.rows:
        return "shards are initialized with the same seed, so each has the values of the first, or a shard is placed wrongly"
    return (
        "shards are initialized on their own (with one seed per rank, or with a scale computed from the size of the shard), or "
        "a fused weight is cut across its parts; initialize before sharding, or load the same checkpoint"
    )


def _cause_of_outputs(first: Difference, factor: str | None, across: str, sizes: Mapping[str, int]) -> str:
    if factor == "0":
        return "the output is never reduced to this rank, or computed from weights that were not loaded"
    if factor is not None and factor in {str(size) for size in sizes.values()}:
        return f"an output that each rank has in full is summed over {factor} ranks"
    if first.across:
        return f"partial results are not all-reduced over {across}, or each rank computes with its own positions, masks or experts"
    return (
        "a bias added on each rank before the all-reduce, positions or masks of the local part used for the whole sequence, heads "
        "or experts in another order"
    )


def _cause_of_gradients(
    first: Difference, factor: str | None, across: str, is_all: bool, data: int, model: Mapping[str, int]
) -> str:
    if first.combined:
        verb = "summed" if first.combined == "sum" else "averaged"
        return (
            f"it is replicated over {across}, and each rank has the gradient of its part only; all-reduce it ({verb})"
        )
    if first.across:
        return f"it is replicated over {across}, and its gradient is not all-reduced; copies of the weight will drift apart"
    if factor == "0":
        return (
            "no gradient reaches it: a collective without a backward, a detached tensor, or a parameter that is frozen"
        )
    if factor == "-1":
        return "the sign of the loss or of a custom backward is wrong"
    if factor is not None:
        value = float(first.factor or 0.0)
        if data > 1 and factor == shown_factor(data):
            return (
                f"gradients are summed over the {data} ranks that share the batch, while the loss of each is a mean over its part: "
                "average them, or divide the loss by the global number of tokens"
            )
        if data > 1 and factor == shown_factor(1 / data):
            return (
                f"gradients are divided by {data} twice: by FSDP or DDP, and by a loss over the global batch; set the gradient "
                "divide factor to 1, or use the mean of each rank's part"
            )
        for dimension, size in model.items():
            if factor == shown_factor(size):
                return (
                    f"the gradient of an activation that each rank of {dimension} already has in full is summed over {dimension}; "
                    "its backward should be the identity"
                )
            if factor == shown_factor(1 / size):
                return f"the gradient is averaged over {dimension}, where it has to be summed"
        if abs(value - round(value)) < 1e-2 and is_all:
            return f"{round(value)} micro-batches are accumulated without dividing the loss by their number"
        return "the loss of this parameter is scaled twice, or by a number that depends on the layout"
    if first.rows:
        return (
            "the gradient of a part of the parameter is lost or added twice: the part of some ranks, experts or tokens"
        )
    if is_all:
        return (
            "ranks or micro-batches are weighted otherwise: a mean per rank over different numbers of tokens, ranks that read the "
            "same data, or a reduction in low precision"
        )
    return (
        "the gradient of an activation is not reduced in the backward pass of a later layer, a hook reduces an accumulated gradient "
        "again after each micro-batch, or one of two uses of the parameter does not count"
    )
