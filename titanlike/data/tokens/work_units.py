"""Splits text into work units, and keeps the results of those that are finished. No torch.

Work units and their shards depend on the inputs and options only, not on the number of processes or on interruptions.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from titanlike.data.documents.data_files import File, convert_write_errors, is_address
from titanlike.data.documents.opening import open_file
from titanlike.data.documents.records import LINES, PARQUET, is_array, open_parquet, row_groups
from titanlike.data.tokens.shards import Shard
from titanlike.data.tokens.tokenization import FileSpan, WorkUnit, WorkUnitResult
from titanlike.utils.atomic_write import atomic_write_text, fsync_directory

MIN_SIZE, MAX_SIZE = 4 * 2**20, 256 * 2**20  # bytes of a work unit
TARGET_COUNT = 256  # work units, for many processes
RESULT = "unit-{:05d}.json"


def write_result(result: WorkUnitResult, folder: Path) -> None:
    """Writes a result durably, after the names of its shards are durable."""
    with convert_write_errors(folder):
        fsync_directory(folder)
        atomic_write_text(folder / RESULT.format(result.unit), json.dumps(asdict(result)))
        fsync_directory(folder)


def read_result(folder: Path, unit: int, token_bytes: int) -> WorkUnitResult | None:
    """Reads a result. Returns None if there is none, or if a file of its shards is missing or has another size."""
    try:
        values = json.loads((folder / RESULT.format(unit)).read_text())
        shards = {split: Shard(**shard) for split, shard in values.pop("splits").items()}
        sizes = {f"{shard.name}.tokens": shard.tokens * token_bytes for shard in shards.values()}
        sizes |= {f"{shard.name}.documents": shard.documents * 16 for shard in shards.values()}
        complete = all((folder / name).stat().st_size == size for name, size in sizes.items())
        return WorkUnitResult(splits=shards, **values) if complete else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def remove_results(folder: Path) -> None:
    """Removes the results from a complete folder of token shards: only a resume needs them."""
    for path in folder.glob("unit-*.json"):
        path.unlink()


def split_work_units(files: Sequence[File], count: int = TARGET_COUNT) -> list[WorkUnit]:
    """Splits files, in their order, into `count` work units of similar size, if their size is then within the limits.

    Small files share a work unit. Large files are split where the format permits: between lines, or between the row groups of
    Parquet.
    """
    limit = min(max(sum(file.size for file in files) // count, MIN_SIZE), MAX_SIZE)
    groups: list[list[FileSpan]] = []
    room = 0  # bytes that may be added to the last group
    for file in files:
        spans = _split_file(file, limit)
        unknown_size = file.size == 0 and is_address(file.name)
        if len(spans) > 1 or unknown_size:
            groups += [[span] for span in spans]
            room = -1
        elif groups and file.size <= room:
            groups[-1] += spans
            room -= file.size
        else:
            groups.append(spans)
            room = limit - file.size
    return [WorkUnit(number, tuple(spans)) for number, spans in enumerate(groups)]


def _split_file(file: File, limit: int) -> list[FileSpan]:
    """Splits a file into spans of about `limit` bytes. A file that cannot be split is one span."""
    count = -(-file.size // limit)
    if count > 1 and not file.compressed:
        if file.kind in LINES and not is_array(file) and _is_seekable(file):
            offsets = [file.size * number // count for number in range(count + 1)]
            return [FileSpan(file, stop - start, (start, stop)) for start, stop in pairwise(offsets)]
        if file.kind == PARQUET:
            with open_parquet(file) as table:
                rows = row_groups(table)
            if rows:
                return list(_split_row_groups(file, rows, count))
    return [FileSpan(file, file.size)]


def _split_row_groups(file: File, rows: list[int], count: int) -> Iterator[FileSpan]:
    first, pending, total = 0, 0, max(sum(rows), 1)
    for group, num_rows in enumerate(rows):
        pending += num_rows
        if pending * count >= total or group == len(rows) - 1:
            yield FileSpan(file, file.size * pending // total, (first, group + 1))
            first, pending = group + 1, 0


def _is_seekable(file: File) -> bool:
    """Checks that reading can begin in the middle of a file, which some web servers do not support."""
    if not is_address(file.name):
        return True
    with open_file(file) as stream:
        try:
            stream.seek(file.size // 2)
            return bool(stream.read(1))
        except (OSError, ValueError):
            return False
