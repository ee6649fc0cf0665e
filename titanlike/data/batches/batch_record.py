"""Hashes of the sequences that each rank reads, by which `titanlike verify` compares the batches of two layouts."""

import os
from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# The hashes of the sequences of each global batch, by the kind of data and the step.
Batches = dict[tuple[str, int], Counter[str]]


def record_batch(path: Path, step: int, data_rank: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Appends the hashes of full sequences (N, T) of tokens and labels to the file of this process.

    The name of `path` is the kind of data, `training` or `validation`.
    """
    rows = zip(arrays["tokens"].astype(np.int64), arrays["labels"].astype(np.int64), strict=True)
    hashes = [blake2b(tokens.tobytes() + labels.tobytes(), digest_size=8).hexdigest() for tokens, labels in rows]
    with path.with_name(f"{path.name}.{os.getpid()}").open("a") as out:
        print(step, data_rank, *hashes, file=out)


def read_batches(folder: Path) -> Batches:
    """Reads the records of all ranks. Ranks that share a batch, such as those of tensor parallelism, count once."""
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
