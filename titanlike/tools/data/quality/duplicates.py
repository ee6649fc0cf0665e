"""Finds exact and near duplicates: each work unit writes the keys of its documents, and a merge joins documents that share one.

Of each cluster of duplicates, the first document in the order of the input is kept. Keys are hashes, so they are uniformly
distributed: a part of the range of all keys has about the same share of every sorted file, and is found by bisection. Files are
merged part by part.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.tools.data.quality.hashing import Hashes, Numbers
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import CODES, NUM_EXAMPLES, REASON_OF, Verdicts, orders_of
from titanlike.utils.atomic_write import atomic_write_text, fsync_directory

EXACT, BANDS, VERDICTS = (f"{kind}-{{:05d}}" for kind in ("exact", "bands", "verdicts"))
MERGED, ALL_VERDICTS = "duplicates.json", "verdicts"
MAX_DOCUMENTS = 2**32 - 1
RECORD = 12  # bytes of a key and its number
MAX_RECORDS = 2**21  # of a part: about 100 MiB while it is merged
BLOCK = 2**20  # documents

Parents = npt.NDArray[np.uint32]  # of each document: itself, or an earlier document of its cluster


class MergedPart(NamedTuple):
    """The records of all files in a range of keys."""

    keys: Hashes  # (R,)
    numbers: npt.NDArray[np.uint32]  # (R,)
    files: npt.NDArray[np.int64]  # (R,) index of the file of each, ascending


@dataclass
class Merged:
    """The duplicates among all documents."""

    offsets: list[int]  # index of the first document of each work unit among all
    exact: int
    near: int
    examples: dict[str, list[list[list[int]]]]
    """For each reason, pairs of a duplicate and the document that is kept for it: each a work unit and a position in it."""


def write_run(path: Path, keys: Hashes, numbers: npt.NDArray[Any]) -> None:
    """Writes keys in ascending order, and after them the number of each."""
    order = np.argsort(keys, kind="stable")
    atomic_write_text(path, keys[order].astype("<u8").tobytes() + numbers[order].astype("<u4").tobytes())


def merge(paths: Sequence[Path], max_records: int | None = None) -> Iterator[MergedPart]:
    """Yields the records of all files by ranges of keys, in ascending order of the ranges."""
    counts = [path.stat().st_size // RECORD for path in paths]
    num_parts = max(1, -(-sum(counts) // (max_records or MAX_RECORDS)))
    positions = [0] * len(paths)
    for number in range(1, num_parts + 1 if paths else 0):
        stop = None if number == num_parts else np.uint64(2**64 * number // num_parts)
        found = [_read(*each, stop) for each in zip(paths, counts, positions, strict=True)]
        keys, numbers = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        sizes = [len(keys) for keys, _ in found]
        positions = [begin + size for begin, size in zip(positions, sizes, strict=True)]
        yield MergedPart(keys, numbers, np.repeat(np.arange(len(paths)), sizes))


def _read(path: Path, count: int, begin: int, stop: np.uint64 | None) -> tuple[Hashes, npt.NDArray[np.uint32]]:
    """Returns the records of a file from an index on, up to a key."""
    if begin == count:
        return np.empty(0, np.uint64), np.empty(0, np.uint32)
    keys = np.memmap(path, "<u8", "r", shape=(count,))
    end = count if stop is None else int(np.searchsorted(keys, stop))
    return np.array(keys[begin:end]), np.fromfile(path, "<u4", end - begin, offset=8 * count + 4 * begin)


def merge_keys(job: WorkerOptions, num_units: int) -> None:
    """Joins the documents of all work units and writes the verdict on each. Done once."""
    folder, units = job.stages, range(num_units)
    if read_merged(folder):
        return
    counts = [(folder / VERDICTS.format(unit)).stat().st_size for unit in units]
    offsets: Numbers = np.cumsum([0, *counts])
    if offsets[-1] > MAX_DOCUMENTS:
        raise UserError(f"{offsets[-1]:,} documents: --duplicates finds duplicates among at most {MAX_DOCUMENTS:,}")
    # In files that the kernel may write to the disk, for data with more documents than memory has room for.
    size = max(int(offsets[-1]), 1)
    parents = np.memmap(folder / "parents.partial", np.uint32, "w+", shape=(size,))[: offsets[-1]]
    file = np.memmap(folder / f"{ALL_VERDICTS}.partial", np.uint8, "w+", shape=(size,))
    verdicts = file[: offsets[-1]]
    for unit in units:
        start, stop = offsets[unit : unit + 2]
        parents[start:stop] = np.arange(start, stop)
        verdicts[start:stop] = np.fromfile(folder / VERDICTS.format(unit), np.uint8)
    for name in (EXACT, BANDS) if job.quality.finds_near_duplicates else (EXACT,):
        for part in merge([folder / name.format(unit) for unit in units]):
            first, copies = copies_of(part.keys, offsets[part.files] + part.numbers)
            link(parents, first, copies)
            if name == EXACT:
                verdicts[copies] = CODES["exact_duplicates"]
    merged = _classify(parents, verdicts, offsets, removes=job.quality.removes_duplicates)
    file.flush()
    (folder / f"{ALL_VERDICTS}.partial").replace(folder / ALL_VERDICTS)
    (folder / "parents.partial").unlink()
    fsync_directory(folder)
    atomic_write_text(folder / MERGED, json.dumps(vars(merged)))


def _classify(parents: Parents, verdicts: Verdicts, offsets: Numbers, *, removes: bool) -> Merged:
    """Counts the duplicates and draws examples. Changes the verdict on them to "near duplicate", or to "kept" unless `removes`."""
    exact, near = CODES["exact_duplicates"], CODES["near_duplicates"]
    counts = {exact: 0, near: 0}
    drawn: dict[int, list[tuple[int, int, int]]] = {exact: [], near: []}
    for start in range(0, len(parents), BLOCK):
        codes = verdicts[start : start + BLOCK]
        own = np.arange(start, start + len(codes))
        root = roots(parents, own)
        codes[(codes == 0) & (root != own)] = near
        for code in counts:
            [at] = np.nonzero(codes == code)
            counts[code] += len(at)
            units = np.searchsorted(offsets, own[at], side="right") - 1
            orders = orders_of(units, own[at] - offsets[units])
            best = np.argsort(orders, kind="stable")[:NUM_EXAMPLES]
            found = [(int(orders[i]), int(own[at[i]]), int(root[at[i]])) for i in best]
            drawn[code] = sorted(drawn[code] + found)[:NUM_EXAMPLES]
            if not removes:
                codes[at] = 0

    def place(document: int) -> list[int]:
        unit = int(np.searchsorted(offsets, document, side="right")) - 1
        return [unit, document - int(offsets[unit])]

    examples = {
        REASON_OF[code]: [[place(each), place(root)] for _, each, root in found] for code, found in drawn.items()
    }
    return Merged(offsets.tolist(), counts[exact], counts[near], examples)


def read_merged(folder: Path) -> Merged | None:
    """Returns the result of the merge, or None if it is not finished."""
    path = folder / MERGED
    return Merged(**json.loads(path.read_text())) if path.exists() else None


def read_verdicts(folder: Path, merged: Merged, unit: int) -> Verdicts:
    """Returns the verdict on each document of a work unit."""
    start, stop = merged.offsets[unit : unit + 2]
    return np.fromfile(folder / ALL_VERDICTS, np.uint8, stop - start, offset=start)


def copies_of(keys: Hashes, documents: Numbers) -> tuple[Numbers, Numbers]:
    """Returns pairs of documents that share a key: the first one, and each of the others. Those with the same key must ascend."""
    _, at, inverse = np.unique(keys, return_index=True, return_inverse=True)
    first = documents[at][inverse]
    is_copy = first != documents
    return first[is_copy], documents[is_copy]


def link(parents: Parents, first: Numbers, second: Numbers) -> None:
    """Joins the clusters of each pair of documents. Changes `parents`."""
    while len(first):
        first, second = roots(parents, first), roots(parents, second)
        differ = first != second
        first, second = first[differ], second[differ]
        np.minimum.at(parents, np.maximum(first, second), np.minimum(first, second).astype(np.uint32))


def roots(parents: Parents, documents: Numbers) -> Numbers:
    """Returns the first document of the cluster of each."""
    while True:
        above = parents[documents].astype(np.int64)
        if np.array_equal(above, documents):
            return above
        documents = above
