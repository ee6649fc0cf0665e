"""Compares what the ranks of a layout, or compiled code, recorded of a module with what one process, or eager code, recorded.
Needs no process group.

`diagnosis.py` says in words what is wrong first, and what usually causes that.
"""

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# What is compared, in the order in which a step computes it.
INITIAL, INITIAL_BUFFERS, OUTPUTS, LOSS = "initial weights", "initial buffers", "outputs", "loss"
GRADIENTS, NORM, WEIGHTS, STATE = "gradients", "gradient norm", "weights", "optimizer state"
BUFFERS, DROPOUT = "buffers", "dropout"
ACCUMULATED, WITH_DROPOUT = "accumulated gradients", "gradients with dropout"  # of compiled code
KINDS = (
    INITIAL, INITIAL_BUFFERS, OUTPUTS, LOSS, GRADIENTS, ACCUMULATED, NORM, WEIGHTS, STATE, BUFFERS, DROPOUT, WITH_DROPOUT
)  # fmt: skip
# Relative to the largest element of a tensor: float32 sums in another order, which an optimizer may amplify.
TOLERANCES = {
    INITIAL: 1e-6, INITIAL_BUFFERS: 1e-6, OUTPUTS: 1e-4, LOSS: 1e-5, GRADIENTS: 1e-4, NORM: 1e-4, WEIGHTS: 1e-4, STATE: 1e-3,
    BUFFERS: 1e-4,
}  # fmt: skip
COMPILED_TOLERANCES = TOLERANCES | {ACCUMULATED: 1e-4, WITH_DROPOUT: 1e-4}
SMALLEST = (
    1e-3  # a tensor with smaller elements is compared relative to this fraction of the largest element of its phase
)
FUSED = (2, 3)  # parts of a fused weight, such as gate and up, or query, key and value
PROPORTIONAL = 1e-3  # largest relative difference from a multiple
NAME = "name"  # a further dimension: copies of a tied weight with different names

Phase = tuple[str, int]  # what is compared, and the step, or 0
Copy = tuple[Mapping[str, int], Tensor]  # a tensor, and the coordinates of its rank in the mesh


@dataclass
class ProcessRecord:
    """What one process computed. A tensor of a rank is full, or a shard."""

    coordinates: dict[str, int] = field(default_factory=dict)  # of the rank in the mesh
    tensors: dict[Phase, dict[str, Tensor]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # modules and parameters, in the order of their first use
    ties: dict[str, str] = field(default_factory=dict)  # further names of a parameter, and the name of its tensors
    dropout_inputs: dict[str, Tensor] = field(default_factory=dict)

    def only(self, kinds: Container[str]) -> "ProcessRecord":
        """Returns the record without tensors of other kinds."""
        return replace(self, tensors={phase: each for phase, each in self.tensors.items() if phase[0] in kinds})


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the tensor of one process."""

    name: str
    size: float  # the largest difference, relative to the largest element
    factor: float | None = None  # all ranks have this multiple
    across: tuple[str, ...] = ()  # dimensions of the mesh along which copies of the tensor differ
    combined: str = ""  # "sum" or "mean", if it makes copies along `across` the tensor of one process
    part: str = ""  # the slice that is wrong, if the rest is not
    problem: str = ""  # in place of a difference


@dataclass(frozen=True)
class Comparison:
    """A phase: the largest difference, and the differences above the tolerance in the order in which errors spread."""

    kind: str
    step: int
    num_compared: int
    worst: float
    wrong: tuple[Difference, ...] = ()
    num_skipped: int = 0  # outputs that are neither full nor shards

    @property
    def title(self) -> str:
        return f"{self.kind}, step {self.step}" if self.step else self.kind


def compare(
    one: ProcessRecord,
    ranks: Sequence[ProcessRecord],
    batch_dimensions: Sequence[str] = (),
    tolerances: Mapping[str, float] = TOLERANCES,
) -> list[Comparison]:
    """Compares all phases, in the order in which they were computed. `batch_dimensions` are dimensions of the mesh whose
    ranks have different parts of the batch."""
    found = []
    for kind, step in sorted({phase for record in (one, *ranks) for phase in record.tensors}, key=_when):
        if kind == DROPOUT:
            found.append(_compare_dropout(ranks))
        elif kind == LOSS:
            found.append(_compare_loss(one, ranks, step, batch_dimensions, tolerances[LOSS]))
        else:
            found.append(_compare_tensors(one, ranks, kind, step, batch_dimensions, tolerances[kind]))
    return found


def _when(phase: Phase) -> tuple[int, int, int]:
    kind, step = phase
    return 2 if kind in (BUFFERS, DROPOUT, WITH_DROPOUT) else min(step, 1), step, KINDS.index(kind)


def _compare_tensors(
    one: ProcessRecord,
    ranks: Sequence[ProcessRecord],
    kind: str,
    step: int,
    batch_dimensions: Sequence[str],
    tolerance: float,
) -> Comparison:
    expected = one.tensors.get((kind, step), {})
    copies: dict[str, list[Copy]] = {name: [] for name in expected}
    aliases: dict[str, list[str]] = {}  # the names that ranks have for a tensor
    for record in ranks:
        for name, tensor in record.tensors.get((kind, step), {}).items():
            parameter, colon, rest = name.partition(": ")
            canonical = one.ties.get(parameter, parameter) + colon + rest
            names = aliases.setdefault(canonical, [])
            if name not in names:
                names.append(name)
            copies.setdefault(canonical, []).append((record.coordinates | {NAME: names.index(name)}, tensor))
    scales: dict[str, float] = {}  # of each kind of optimizer state, otherwise of all tensors
    for name, tensor in expected.items():
        _, _, state = name.partition(": ")
        scales[state] = max(scales.get(state, 0.0), SMALLEST * _largest(tensor))
    wrong: list[Difference] = []
    sizes: dict[str, float] = {}
    for name, found in copies.items():
        if name not in expected:
            wrong.append(Difference(name, math.inf, problem="exists under the layout only"))
        elif found:
            scale, may_be_partial = scales[name.partition(": ")[2]], kind == OUTPUTS and name != ""
            difference = difference_of(name, expected[name], found, scale, tolerance, may_be_partial=may_be_partial)
            # Some outputs have a shape of their own, or are reduced over the rows of each rank.
            if kind == OUTPUTS and (difference.problem or set(difference.across) & set(batch_dimensions)):
                continue
            sizes[name] = difference.size
            if not difference.size <= tolerance:
                wrong.append(difference)
        elif kind != OUTPUTS:
            wrong.append(Difference(name, math.inf, problem="exists in one process only"))
    worst = max(sizes.values(), default=0.0)
    if kind == OUTPUTS:
        # Only the output of the model itself must agree. Outputs of its modules say where an error begins.
        worst = sizes.get("", 0.0)
        wrong = wrong if worst > tolerance else []
        sizes = sizes if "" in sizes else {}
    position = {name: number for number, name in enumerate(one.order)}
    sign = (
        -1 if kind in (GRADIENTS, ACCUMULATED, WITH_DROPOUT) else 1
    )  # the backward pass starts at the end of the network
    wrong.sort(key=lambda difference: sign * position.get(difference.name.partition(": ")[0], len(position)))
    num_problems = sum(bool(each.problem) for each in wrong)
    return Comparison(
        kind, step, len(sizes) + num_problems, worst, tuple(wrong), len(copies) - len(sizes) - num_problems
    )


def difference_of(
    name: str,
    expected: Tensor,
    found: Sequence[Copy],
    scale: float,
    tolerance: float,
    *,
    may_be_partial: bool = False,
) -> Difference:
    """Compares a tensor of one process with the ranks' tensors, relative to its largest element, or to `scale` if that is larger.

    Shards are concatenated along the dimensions that give the full shape. Of several ways, the one that agrees best counts. With
    `may_be_partial`, so does the sum over ranks.
    """
    candidates = list(_assembled(expected.shape, found))
    if not candidates:
        shape = tuple(found[0][1].shape)
        return Difference(name, math.inf, problem=f"has the shape {shape}, in one process {tuple(expected.shape)}")
    reference = expected.double()
    size = max(_largest(expected), scale)

    def relative(tensor: Tensor) -> float:
        value = (tensor.double() - reference).abs().max().item() if tensor.numel() else 0.0
        return (value / size if size else math.inf if value else 0.0) if math.isfinite(value) else math.inf

    def worst_of(copies: Sequence[Copy]) -> float:
        return max(relative(tensor) for _, tensor in copies)

    if may_be_partial:
        candidates += [[({}, torch.stack([tensor for _, tensor in copies]).sum(0))] for copies in candidates]
    copies = min(candidates, key=worst_of)
    worst = worst_of(copies)
    if worst > tolerance:
        fused = [copies for copies in _assembled(expected.shape, found, fused=True) if worst_of(copies) <= tolerance]
        copies = fused[0] if fused else copies
        worst = worst_of(copies)
    if worst <= tolerance:
        return Difference(name, worst)
    allowed = tolerance * size
    across = _varying([(at, tensor.double()) for at, tensor in copies], allowed)
    if across:
        return Difference(name, worst, across=across, combined=_combined(copies, across, reference, allowed))
    tensor = copies[0][1].double()
    factor = _multiple(tensor, reference, size) if size == _largest(expected) else None  # not of rounding errors
    return Difference(name, worst, factor, part=_wrong_part(tensor, reference, allowed))


def _assembled(shape: torch.Size, found: Sequence[Copy], *, fused: bool = False) -> Iterator[list[Copy]]:
    """Yields copies of the full tensor with the coordinates of their ranks: once for each way to concatenate shards. With `fused`,
    a shard has a chunk of each of several fused parts."""
    if found[0][1].ndim != len(shape):
        return
    dimensions = [each for each in found[0][0] if each != NAME]
    sizes = {each: len({at[each] for at, _ in found}) for each in dimensions}
    ways: list[tuple[int, int] | None] = [None, *itertools.product(range(len(shape)), FUSED if fused else [1])]
    sharded = [local != full for local, full in zip(found[0][1].shape, shape, strict=True)]
    for chosen in itertools.product(*(ways if sizes[each] > 1 else [None] for each in dimensions)):
        if any(way and (not sharded[way[0]] or found[0][1].shape[way[0]] % way[1]) for way in chosen):
            continue
        copies = list(found)
        for dimension, way in reversed(list(zip(dimensions, chosen, strict=True))):
            if way:
                copies = _concatenated(copies, dimension, *way)
        if all(tensor.shape == shape for _, tensor in copies):
            yield copies


def _concatenated(shards: Sequence[Copy], dimension: str, axis: int, num_parts: int) -> list[Copy]:
    """Concatenates the shards along a dimension of the mesh, each of their parts by itself."""
    groups: dict[tuple[tuple[str, int], ...], dict[int, Tensor]] = {}  # by the other coordinates
    for at, tensor in shards:
        others = tuple((other, number) for other, number in at.items() if other != dimension)
        groups.setdefault(others, {})[at[dimension]] = tensor
    copies: list[Copy] = []
    for others, group in groups.items():
        parts = zip(*(group[number].chunk(num_parts, axis) for number in sorted(group)), strict=True)
        copies.append((dict(others), torch.cat([chunk for part in parts for chunk in part], axis)))
    return copies


def _varying(copies: Sequence[Copy], allowed: float) -> tuple[str, ...]:
    """Returns the dimensions along which copies differ by more than `allowed`."""

    def differs(dimension: str) -> bool:
        return any(
            not (a - b).abs().max().item() <= allowed
            for (at, a), (to, b) in itertools.combinations(copies, 2)
            if all((at[other] != to[other]) == (other == dimension) for other in at)
        )

    found = tuple(dimension for dimension in copies[0][0] if differs(dimension))
    names = {at[NAME] for at, _ in copies if NAME in at}
    if len(names) > 1 and NAME not in found:
        # Names that no rank has both of: the dimension that separates them.
        differing = any(
            not (a - b).abs().max().item() <= allowed for (_, a), (_, b) in itertools.combinations(copies, 2)
        )
        return (*found, NAME) if differing else found
    return found


def _largest(tensor: Tensor) -> float:
    value = tensor.abs().max().item() if tensor.numel() else 0.0
    return value if math.isfinite(value) else 0.0


def _combined(copies: Sequence[Copy], across: Sequence[str], expected: Tensor, allowed: float) -> str:
    """Returns "sum" or "mean" if it makes the copies that differ the expected tensor, otherwise an empty string."""
    others = [each for each in copies[0][0] if each not in across and NAME not in across]
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for at, tensor in copies:
        groups.setdefault(tuple(at[other] for other in others), []).append(tensor.double())
    for name, is_mean in (("sum", False), ("mean", True)):
        totals = [torch.stack(group).mean(0) if is_mean else torch.stack(group).sum(0) for group in groups.values()]
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


def _wrong_part(found: Tensor, expected: Tensor, allowed: float) -> str:
    """Returns the slice that differs, if one dimension has a contiguous part outside of which all agrees."""
    wrong = (found - expected).abs() > allowed
    for axis, length in enumerate(found.shape):
        others = [other for other in range(found.ndim) if other != axis]
        where = (wrong.any(dim=others) if others else wrong).nonzero().flatten().tolist()
        if where and len(where) < length and where[-1] - where[0] + 1 == len(where):
            return f"[{':, ' * axis}{where[0]}:{where[-1] + 1}]"
    return ""


def _compare_loss(
    one: ProcessRecord, ranks: Sequence[ProcessRecord], step: int, batch_dimensions: Sequence[str], tolerance: float
) -> Comparison:
    """The mean over all ranks that have a loss, or the sum over the parts of the batch, must be the loss of one process."""
    expected = float(one.tensors[LOSS, step]["loss"]) if one.tensors[LOSS, step] else math.nan
    found: list[Copy] = [
        (record.coordinates, record.tensors[LOSS, step]["loss"].double())
        for record in ranks
        if record.tensors.get((LOSS, step))
    ]
    if not found or math.isnan(expected):
        return Comparison(LOSS, step, 0, 0.0, num_skipped=1)
    parts = len({tuple(at.get(each, 0) for each in batch_dimensions) for at, _ in found})
    mean = sum(float(value) for _, value in found) / len(found)
    size = max(abs(expected), 1e-6)
    worst = min(
        (abs(value - expected) / size for value in (mean, mean * parts) if math.isfinite(value)), default=math.inf
    )
    across = tuple(each for each in _varying(found, tolerance * size) if each not in batch_dimensions)
    if worst <= tolerance and not across:
        return Comparison(LOSS, step, 1, worst)
    factor = mean / expected if expected and math.isfinite(mean) and not across else None
    return Comparison(LOSS, step, 1, worst, (Difference("loss", worst, factor, across),))


def _compare_dropout(ranks: Sequence[ProcessRecord]) -> Comparison:
    """Ranks with the same input must have the same mask, and those with different inputs different masks."""
    wrong = []
    masks = [record.tensors.get((DROPOUT, 0), {}) for record in ranks]
    names = [name for name in masks[0] if all(name in each for each in masks)]
    for name in names:
        for one, other in itertools.combinations(range(len(ranks)), 2):
            mask, other_mask = masks[one][name], masks[other][name]
            if mask.shape != other_mask.shape or mask.numel() < 32:  # small masks may be equal by chance
                continue
            input, other_input = ranks[one].dropout_inputs[name], ranks[other].dropout_inputs[name]
            has_same_input = torch.allclose(input, other_input, rtol=1e-4, atol=1e-6)
            if has_same_input != torch.equal(mask, other_mask):
                to = ranks[other].coordinates
                across = tuple(each for each, number in ranks[one].coordinates.items() if number != to[each])
                problem = "differs" if has_same_input else "is the same"
                wrong.append(Difference(name.partition(" #")[0], math.inf, across=across, problem=problem))
                break
    return Comparison(DROPOUT, 0, len(names), math.inf if wrong else 0.0, tuple(wrong))
