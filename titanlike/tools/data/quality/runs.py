"""Sorted files of keys, which are merged range by range in bounded memory.

A work unit writes one file of unique keys in ascending order, and the number of each after all keys. The keys are hashes, so they
are uniformly distributed: a part of the range of all keys has about the same share of every file, and is found by bisection.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from titanlike.tools.data.quality.hashing import Hashes
from titanlike.utils.atomic_write import atomic_write_text

RECORD = 12  # bytes of a key and its number
MAX_RECORDS = 2**21  # of a part: about 100 MiB while it is merged


class MergedPart(NamedTuple):
    """The records of all files in a range of keys."""

    keys: Hashes  # (R,)
    numbers: npt.NDArray[np.uint32]  # (R,)
    files: npt.NDArray[np.int64]  # (R,) index of the file of each, ascending


def write_run(path: Path, keys: Hashes, numbers: npt.NDArray[Any]) -> None:
    """Writes sorted keys and the number of each."""
    atomic_write_text(path, keys.astype("<u8").tobytes() + numbers.astype("<u4").tobytes())


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
