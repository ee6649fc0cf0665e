"""Curves of a run from its records: repeated steps removed, down-sampled so that every spike and every non-finite value stays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Records = Sequence[dict[str, Any]]

TRAINING, VALIDATION, SKIPPED = KINDS = (
    "loss",
    "validation_loss",
    "skipped",
)  # kinds of records, by the key that each has
METRICS = ("loss", "grad_norm", "tokens_per_second", "memory_gib", "learning_rate", "mfu")
AVERAGED = ("loss", "grad_norm", "tokens_per_second")


@dataclass(frozen=True)
class Series:
    """A down-sampled curve. Values are NaN where they were not finite."""

    steps: Array
    values: Array
    mean_steps: Array
    means: Array
    """The mean of each bucket, and its middle; empty if all records are kept."""


def add_wall_time(records: Records) -> None:
    """Adds `seconds` since the first start to each record. `elapsed_seconds` restarts at zero when a run resumes."""
    before = last = 0.0
    for record in records:
        if (elapsed := record.get("elapsed_seconds")) is not None:
            if elapsed < last:
                before += last
            last = elapsed
            record["seconds"] = before + elapsed


def of_kind(records: Records, kind: str) -> Records:
    """Returns the records of a kind. Of steps that a resumed run repeated, the later record counts."""
    kept, first = [], math.inf  # the first step of the later records
    for record in reversed(records):
        found = next((name for name in KINDS if name in record), "")
        if found == kind and record["step"] < first:
            kept.append(record)
        if found in (kind, TRAINING):
            first = min(first, record["step"])
    return kept[::-1]


def column(records: Records, name: str) -> Array:
    """Returns a value of each record; NaN where it is missing or None."""
    return np.array([record.get(name) for record in records], np.float64)


def make_series(steps: Array, values: Array, num_buckets: int, *, averaged: bool) -> Series:
    """Returns a curve with the minimum, the maximum and the first non-finite value of each bucket, and the means if `averaged`."""
    count, empty = len(values), np.zeros(0)
    if count <= 2 * num_buckets:
        return Series(steps, values, empty, empty)
    size = -(-count // num_buckets)
    starts = np.arange(0, count, size)
    is_value = np.arange(len(starts) * size).reshape(-1, size) < count
    buckets = np.resize(values, is_value.shape)
    finite = np.isfinite(buckets) & is_value
    bad = ~finite & is_value
    kept = [
        np.array([0, count - 1]),
        starts + np.where(finite, buckets, np.inf).argmin(1),
        starts + np.where(finite, buckets, -np.inf).argmax(1),
        (starts + bad.argmax(1))[bad.any(1)],
    ]
    indices = np.unique(np.concatenate(kept))
    if not averaged:
        return Series(steps[indices], values[indices], empty, empty)
    counts, sums = finite.sum(1), np.where(finite, buckets, 0.0).sum(1)
    means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    ends = np.minimum(starts + size, count) - 1
    return Series(steps[indices], values[indices], (steps[starts] + steps[ends]) / 2, means)


def curves(training: Records, validation: Records, num_buckets: int) -> dict[str, Series]:
    """Returns the curves of a run that have values."""
    found = {}
    for name in (*METRICS, VALIDATION):
        records = validation if name == VALIDATION else training
        values = column(records, name)
        # A loss that is not finite is a result. Other values are missing where the device does not have them.
        if len(values) and (name in (TRAINING, VALIDATION) or np.isfinite(values).any()):
            found[name] = make_series(column(records, "step"), values, num_buckets, averaged=name in AVERAGED)
    return found


def x_axis(training: Records, num_buckets: int) -> dict[str, Array]:
    """Returns tokens and hours at some steps. Between them, they are interpolated."""
    indices = np.unique(np.linspace(0, max(len(training) - 1, 0), num_buckets).round().astype(np.intp))[: len(training)]
    chosen = [training[index] for index in indices]
    return {
        "step": column(chosen, "step"),
        "tokens": column(chosen, "tokens"),
        "hours": column(chosen, "seconds") / 3600,
    }
