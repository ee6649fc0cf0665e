"""Compares the batches of two runs, from the hashes that their ranks recorded."""

from collections import Counter
from pathlib import Path

# The hashes of the sequences of each global batch, by the kind of data and the step.
Batches = dict[tuple[str, int], Counter[str]]


def read_batches(folder: Path) -> Batches:
    """Reads the records of all ranks. Ranks that share a batch, such as tensor-parallel ranks, count once."""
    lines = {(file.name.partition(".")[0], line) for file in folder.iterdir() for line in file.read_text().splitlines()}
    batches: Batches = {}
    for kind, line in lines:
        step, _, *hashes = line.split()
        batches.setdefault((kind, int(step)), Counter()).update(hashes)
    return batches


def first_difference(one: Batches, other: Batches) -> tuple[str, int, int] | None:
    """Returns the kind and step of the first batch that differs, and the number of its sequences in `other` and of those that
    `one` does not have. None: the batches are equal, in any order of their sequences."""
    for kind, step in sorted(one.keys() | other.keys()):
        expected, found = one.get((kind, step), Counter()), other.get((kind, step), Counter())
        if expected != found:
            where = f"step {step}" if kind == "training" else f"{kind} batch {step}"
            return where, found.total(), (found - expected).total()
    return None
