"""Removes lines that occur in many documents, such as menus and copyright notices.

They are counted among the documents that the filters and the removal of duplicates keep: the lines of a document with many
copies are not boilerplate.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titanlike.data.tokens.tokenization import ReportProgress, WorkUnit, check_unchanged
from titanlike.tools.data.quality.candidates import CandidateDocument, skip_bad, survivors
from titanlike.tools.data.quality.hashing import Hashes, lines_of
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import Verdicts
from titanlike.tools.data.quality.runs import is_complete, merge, write_run
from titanlike.utils.atomic_write import atomic_writer, fsync_directory, write_all

COUNTED, REPEATED = "lines-{:05d}", "repeated-lines"
MAX_REMOVED = 0.5  # of a document's visible bytes that are in such lines; a document with more is removed


def count_lines(unit: WorkUnit, job: WorkerOptions, verdicts: Verdicts | None, report: ReportProgress) -> None:
    """Writes the lines of the documents of a work unit that are kept, with the number of documents that have each."""
    found: list[Hashes] = []
    first = 0
    for span in unit.spans:
        unread = span.size
        for group in survivors(span, unit.number, job, first, verdicts, {}, skip_bad(job)):
            first += len(group)
            contents = [candidate.content for candidate, reason in group if candidate.text and not reason]
            if contents:
                lines = lines_of(contents)
                order = np.lexsort((lines.hashes, lines.texts))
                hashes, texts = lines.hashes[order], lines.texts[order]
                is_first = np.append(True, (hashes[1:] != hashes[:-1]) | (texts[1:] != texts[:-1]))[: len(hashes)]
                found.append(hashes[is_first])
            read = min(sum(candidate.document.size for candidate, _ in group), unread)
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


def merge_lines(job: WorkerOptions, units: Sequence[int]) -> None:
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


def remove_lines(candidates: Sequence[CandidateDocument], repeated: Hashes) -> dict[int, Cleaned]:
    """Removes the repeated lines of documents, unless most of a document are such lines. Returns what was removed from those that
    have some, by their position in the work unit."""
    if not candidates or not len(repeated):
        return {}
    lines = lines_of([candidate.content for candidate in candidates])
    at = np.minimum(np.searchsorted(repeated, lines.hashes), len(repeated) - 1)
    [found] = np.nonzero(repeated[at] == lines.hashes)
    bounds = np.searchsorted(lines.texts[found], np.arange(len(candidates) + 1))
    cleaned = {}
    for number in np.unique(lines.texts[found]).tolist():
        candidate, matches = candidates[number], found[bounds[number] : bounds[number + 1]]
        cleaned[candidate.position] = _remove(candidate, lines.starts[matches].tolist(), lines.ends[matches].tolist())
    return cleaned


def _remove(candidate: CandidateDocument, starts: list[int], ends: list[int]) -> Cleaned:
    content = candidate.content
    rest = b"".join(content[first:last] for first, last in zip([0, *ends], [*starts, len(content)], strict=True))
    visible, left = (len(each.translate(None, b" \t\r\n\v\f")) for each in (content, rest))
    example = content[starts[0] : ends[0]].decode(errors="replace").strip()
    dominated = visible - left > MAX_REMOVED * visible or not left
    if not dominated:
        candidate.text, candidate.content = rest.decode(), rest
    return Cleaned(len(content) - len(rest), example, dominated)
