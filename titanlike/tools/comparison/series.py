"""Curves of a run: repeated steps removed, down-sampled so that every spike and every non-finite value stays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titanlike.tools.comparison.reader import SKIPPED, TRAINING, VALIDATION

Array = NDArray[np.float64]
Columns = dict[str, Array]

TRAINING_METRICS = ("loss", "grad_norm", "tokens_per_second", "memory_gib", "learning_rate", "mfu")
AVERAGED_METRICS = ("loss", "grad_norm", "tokens_per_second")


@dataclass(frozen=True)
class Series:
    """A down-sampled curve. Values are NaN where they were not finite."""

    steps: Array
    values: Array
    mean_steps: Array
    means: Array
    """The mean of each bucket, and its middle; empty if all records are kept."""


@dataclass(frozen=True)
class XAxis:
    """Tokens and seconds at some steps. Between them, they are interpolated."""

    steps: Array
    tokens: Array
    seconds: Array


def wall_seconds(columns: Columns) -> Array:
    """Returns the time of each record since the first start. `elapsed_seconds` restarts at zero when a run resumes."""
    elapsed = columns["elapsed_seconds"]
    (known,) = np.nonzero(np.isfinite(elapsed))
    values = elapsed[known]
    before = np.where(values[1:] < values[:-1], values[:-1], 0.0)
    total = np.full_like(elapsed, np.nan)
    total[known] = values + np.concatenate([np.zeros(min(len(values), 1)), np.cumsum(before)])
    return total


def without_repeated_steps(columns: Columns) -> dict[int, Columns]:
    """Returns the records of each kind. Of steps that a resumed run repeated, the later record counts, as does the time."""
    columns = columns | {"seconds": wall_seconds(columns)}
    kinds, steps = columns["kind"], columns["step"]
    result = {}
    for kind in (TRAINING, VALIDATION, SKIPPED):
        relevant = (kinds == kind) | (kinds == TRAINING)
        later = np.minimum.accumulate(np.where(relevant, steps, np.inf)[::-1])[::-1]
        kept = kinds == kind
        kept[:-1] &= steps[:-1] < later[1:]
        result[kind] = {name: values[kept] for name, values in columns.items()}
    return result


def downsample(values: Array, num_buckets: int) -> NDArray[np.intp]:
    """Returns the indices of the values to keep: of each bucket the minimum, the maximum and the first non-finite value."""
    count = len(values)
    if count <= 2 * num_buckets:
        return np.arange(count)
    size = -(-count // num_buckets)
    starts = np.arange(0, count, size)
    padded = np.full(len(starts) * size, np.nan)
    padded[:count] = values
    finite = np.isfinite(padded)
    is_bad = ~finite
    is_bad[count:] = False
    bad = is_bad.reshape(-1, size)
    kept = [
        np.array([0, count - 1]),
        starts + np.where(finite, padded, np.inf).reshape(-1, size).argmin(1),
        starts + np.where(finite, padded, -np.inf).reshape(-1, size).argmax(1),
        (starts + bad.argmax(1))[bad.any(1)],
    ]
    return np.unique(np.concatenate(kept))


def make_series(steps: Array, values: Array, num_buckets: int, *, averaged: bool) -> Series:
    """Returns a down-sampled curve, with the means of its buckets if `averaged`."""
    kept = downsample(values, num_buckets)
    mean_steps = means = np.zeros(0)
    if averaged and len(kept) < len(values):
        starts = np.arange(0, len(values), -(-len(values) // num_buckets))
        finite = np.isfinite(values)
        counts = np.add.reduceat(finite, starts, dtype=np.float64)
        sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
        means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
        ends = np.minimum(np.append(starts[1:], len(values)), len(values)) - 1
        mean_steps = (steps[starts] + steps[ends]) / 2
    return Series(steps[kept], values[kept], mean_steps, means)


def curves(records: dict[int, Columns], num_buckets: int) -> tuple[dict[str, Series], XAxis]:
    """Returns the curves of a run that have values, and their x axis."""
    training, validation = records[TRAINING], records[VALIDATION]
    steps = training["step"]
    found = {}
    for name in TRAINING_METRICS:
        values = training[name]
        # A loss that is not finite is a result. Other values are missing where the device does not have them.
        if len(values) and (name == "loss" or np.isfinite(values).any()):
            found[name] = make_series(steps, values, num_buckets, averaged=name in AVERAGED_METRICS)
    if len(validation["step"]):
        found["validation_loss"] = make_series(
            validation["step"], validation["validation_loss"], num_buckets, averaged=False
        )
    kept = np.unique(np.linspace(0, max(len(steps) - 1, 0), num_buckets).round().astype(np.intp))[: len(steps)]
    return found, XAxis(steps[kept], training["tokens"][kept], training["seconds"][kept])
