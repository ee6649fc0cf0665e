"""Removes lines that occur in many documents, such as menus and copyright notices.

They are counted among the documents that the filters and the removal of duplicates keep: the lines of a document with many
copies are not boilerplate.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titanlike.data.tokens.tokenization import ReportProgress, WorkUnit, check_unchanged
from titanlike.tools.data.quality.candidates import Candidate, skip_bad, survivors
from titanlike.tools.data.quality.hashing import Hashes, lines_of, pieces
from titanlike.tools.data.quality.options import Job
from titanlike.tools.data.quality.report import Verdicts
from titanlike.tools.data.quality.runs import is_complete, merge, write_run
from titanlike.utils.files import atomic_writer, fsync_directory, write_all

COUNTED, REPEATED = "lines-{:05d}", "repeated-lines"
MAX_REMOVED = 0.5  # of a document's characters that are in such lines; a document with more is removed


def count_lines(unit: WorkUnit, job: Job, verdicts: Verdicts | None, report: ReportProgress) -> None:
    """Writes the lines of the documents of a work unit that are kept, with the number of documents that have each."""
    found: list[Hashes] = []
    first = 0
    for span in unit.spans:
        unread = span.size
        for candidate, reason in survivors(span, unit.number, job, first, verdicts, {}, skip_bad(job)):
            first += 1
            if candidate.text and not reason:
                found.append(np.unique(np.concatenate([lines_of(piece).hashes for piece in pieces(candidate.content)])))
            read = min(candidate.document.size, unread)
            unread -= read
            report(read, 0)
        check_unchanged(span.file)
        report(unread, 0)
    keys, counts = np.unique(np.concatenate([*found, np.empty(0, np.uint64)]), return_counts=True)
    write_run(job.stages / COUNTED.format(unit.number), keys, counts.astype(np.uint32))
    fsync_directory(job.stages)


def is_counted(folder: Path, unit: int) -> bool:
    """Whether a work unit has been counted."""
    return is_complete(folder / COUNTED.format(unit))


def merge_lines(job: Job, units: Sequence[int]) -> None:
    """Writes the lines that at least `repeated_lines` documents have. Done once."""
    path = job.stages / REPEATED
    if path.exists():
        return
    with atomic_writer(path) as file:
        for part in merge([job.stages / COUNTED.format(unit) for unit in units]):
            if not len(part.keys):
                continue
            order = np.argsort(part.keys, kind="stable")
            keys, counts = part.keys[order], part.numbers[order].astype(np.int64)
            starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
            is_repeated = np.add.reduceat(counts, starts) >= job.quality.repeated_lines
            write_all(file, keys[starts][is_repeated].tobytes())
    fsync_directory(job.stages)


def read_repeated(folder: Path) -> Hashes:
    """Returns the hashes of the lines that are removed, in ascending order."""
    return np.fromfile(folder / REPEATED, "<u8")


class Cleaned(NamedTuple):
    """What is left of a document."""

    removed_bytes: int
    removed: str  # the first of the lines that were removed
    dominated: bool  # more than `MAX_REMOVED` of it are such lines


def remove_lines(candidate: Candidate, repeated: Hashes) -> Cleaned | None:
    """Removes the repeated lines of a document, unless most of it are such lines. Returns None if it has none."""
    kept, example, num_removed = [], b"", 0
    for piece in pieces(candidate.content):
        lines = lines_of(piece)
        at = np.minimum(np.searchsorted(repeated, lines.hashes), len(repeated) - 1)
        is_repeated = repeated[at] == lines.hashes if len(repeated) else np.zeros(len(at), bool)
        num_removed += int(lines.sizes[is_repeated].sum())
        end = 0
        for first, last in zip(lines.starts[is_repeated].tolist(), lines.ends[is_repeated].tolist(), strict=True):
            example = example or piece[first:last]
            kept.append(piece[end:first])
            end = last
        kept.append(piece[end:])
    if not num_removed:
        return None
    visible = len(candidate.content.translate(None, b" \t\r\n\v\f"))
    rest = b"".join(kept)
    dominated = num_removed > MAX_REMOVED * visible or not rest.strip()
    removed_bytes = len(candidate.content) - len(rest)
    if not dominated:
        candidate.text, candidate.content = rest.decode(), rest
    return Cleaned(removed_bytes, example.decode().strip(), dominated)
