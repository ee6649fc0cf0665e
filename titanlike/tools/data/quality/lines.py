"""Removes lines that occur in many documents, such as menus and copyright notices.

They are counted among the documents that the filters and the removal of duplicates keep: the lines of a document with many
copies are not boilerplate.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from titanlike.data.tokens.tokenization import ReportProgress, WorkUnit
from titanlike.tools.data.quality.candidates import CandidateDocument, read_unit
from titanlike.tools.data.quality.hashing import Hashes, lines_of
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import Verdicts
from titanlike.tools.data.quality.runs import merge, write_run
from titanlike.utils.atomic_write import atomic_writer, fsync_directory, write_all

COUNTED, REPEATED = "lines-{:05d}", "repeated-lines"
MAX_REMOVED = 0.5  # of a document's visible bytes that are in such lines; a document with more is removed


def count_lines(unit: WorkUnit, job: WorkerOptions, verdicts: Verdicts | None, report: ReportProgress) -> None:
    """Writes the lines of the documents of a work unit that are kept, with the number of documents that have each."""
    found: list[Hashes] = [np.empty(0, np.uint64)]
    for group in read_unit(unit, job, verdicts, {}, report):
        if kept := group.kept:
            lines = lines_of([each.content for each in kept])
            order = np.lexsort((lines.hashes, lines.texts))
            hashes, texts = lines.hashes[order], lines.texts[order]
            is_first = np.append(True, (hashes[1:] != hashes[:-1]) | (texts[1:] != texts[:-1]))[: len(hashes)]
            found.append(hashes[is_first])
    keys, counts = np.unique(np.concatenate(found), return_counts=True)
    write_run(job.stages / COUNTED.format(unit.number), keys, counts)


def merge_lines(job: WorkerOptions, num_units: int) -> None:
    """Writes the lines that at least `repeated_lines` documents have. Done once."""
    path = job.stages / REPEATED
    if path.exists():
        return
    with atomic_writer(path) as file:
        for part in merge([job.stages / COUNTED.format(unit) for unit in range(num_units)]):
            keys, place = np.unique(part.keys, return_inverse=True)
            is_repeated = np.bincount(place, part.numbers, len(keys)) >= job.quality.repeated_lines
            write_all(file, keys[is_repeated].tobytes())
    fsync_directory(job.stages)


def read_repeated(folder: Path) -> Hashes:
    """Returns the hashes of the lines that are removed, in ascending order."""
    return np.fromfile(folder / REPEATED, "<u8")


def remove_lines(
    candidates: Sequence[CandidateDocument], repeated: Hashes
) -> Iterator[tuple[CandidateDocument, int, str]]:
    """Removes the repeated lines of documents, or the document if most of it are such lines. Yields each document that has some,
    with the bytes of the lines and the first line."""
    if not candidates or not len(repeated):
        return
    lines = lines_of([candidate.content for candidate in candidates])
    at = np.minimum(np.searchsorted(repeated, lines.hashes), len(repeated) - 1)
    [found] = np.nonzero(repeated[at] == lines.hashes)
    bounds = np.searchsorted(lines.texts[found], np.arange(len(candidates) + 1))
    for number in np.unique(lines.texts[found]).tolist():
        candidate, matches = candidates[number], found[bounds[number] : bounds[number + 1]]
        content, starts, ends = candidate.content, lines.starts[matches].tolist(), lines.ends[matches].tolist()
        rest = b"".join(content[first:last] for first, last in zip([0, *ends], [*starts, len(content)], strict=True))
        visible, left = (len(each.translate(None, b" \t\r\n\v\f")) for each in (content, rest))
        if visible - left > MAX_REMOVED * visible or not left:
            candidate.reason = "boilerplate"
        else:
            candidate.text, candidate.content = rest.decode(), rest
        yield candidate, len(content) - len(rest), content[starts[0] : ends[0]].decode(errors="replace").strip()
