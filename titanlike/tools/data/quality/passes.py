"""What a worker process does with a work unit in each pass over the text, and what happens between the passes."""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.data.documents.readers import Document, OnBadRecord, chunks_of
from titanlike.data.tokens.tokenization import FileSpan, ReportProgress, WorkUnit, WorkUnitResult, tokenize
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.data.tokens.work_units import write_result
from titanlike.tools.data.quality import duplicates
from titanlike.tools.data.quality.documents import CandidateDocument, UnitReader
from titanlike.tools.data.quality.duplicates import merge, write_run
from titanlike.tools.data.quality.filters import SPACES
from titanlike.tools.data.quality.hashing import BANDS, Hashes, Numbers, band_keys, shingles_of, signatures_of
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import CODES, EXCERPT, FORMAT, Tally
from titanlike.utils.atomic_write import atomic_write_text, atomic_writer, fsync_directory, write_all

READ, KEPT, CHANGED, CLEANED = "read", "kept", "changed", "cleaned"  # tallies of documents that are not removed
COPIES, LINES, RESULT = "copies-{:05d}", "lines-{:05d}", "{}-{:05d}.json"
REPEATED = "repeated-lines"
MIN_LINE = 8  # bytes of the shortest line that is counted, so that brackets and list markers are not
MAX_REMOVED = 0.5  # of a document's visible bytes that are in repeated lines; a document with more is removed


def process(unit: WorkUnit, job: WorkerOptions, tokenizer: Tokenizer, report: ReportProgress) -> WorkUnitResult | None:
    """Does the pass `job.stage` over a work unit and writes what it found. Returns the result of tokenization."""
    merged = duplicates.read_merged(job.stages)
    reader = UnitReader(unit, job, duplicates.read_verdicts(job.stages, merged, unit.number) if merged else None)
    result, found = None, dict[str, Any]()
    if job.stage == "duplicates":
        _find_keys(reader, report)
    elif job.stage == "lines":
        _count_lines(reader, report)
    else:
        documents = KeptDocuments(reader, merged)
        result = tokenize(unit, job, tokenizer, report, documents if job.quality.reads_documents else None)
        found["excerpts"] = documents.excerpts
        keys = np.unique(np.array(result.hashes, np.uint64))
        write_run(job.stages / COPIES.format(unit.number), keys, np.zeros(len(keys)))
        result.hashes = None  # the results of all work units are in memory together
    found["tallies"] = {reason: vars(tally) for reason, tally in reader.tallies.items()}
    fsync_directory(job.stages)  # a result is durable after what it says to be there
    atomic_write_text(job.stages / RESULT.format(job.stage, unit.number), json.dumps(found))
    fsync_directory(job.stages)
    if result:
        write_result(result, job.folder)
    return result


def is_finished(unit: int, job: WorkerOptions) -> bool:
    """Whether an earlier start wrote what the pass `job.stage` writes for a work unit, besides the result of tokenization."""
    return (job.stages / RESULT.format(job.stage, unit)).exists()


def finish_pass(units: Sequence[WorkUnit], job: WorkerOptions) -> None:
    """Joins what the work units of a pass wrote, for the next one. Done once."""
    if job.stage == "duplicates":
        duplicates.merge_keys(job, len(units))
    elif job.stage == "lines" and not (job.stages / REPEATED).exists():
        with atomic_writer(job.stages / REPEATED) as file:
            for part in merge([job.stages / LINES.format(unit.number) for unit in units]):
                keys, place = np.unique(part.keys, return_inverse=True)
                is_repeated = np.bincount(place, part.numbers, len(keys)) >= job.quality.repeated_lines
                write_all(file, keys[is_repeated].astype("<u8").tobytes())
        fsync_directory(job.stages)


def _find_keys(reader: UnitReader, report: ReportProgress) -> None:
    """Writes the keys of the documents that the filters keep, and the verdicts of the filters."""
    codes = bytearray()
    # Keys and the documents that have them.
    exact: list[tuple[Hashes, Numbers]] = [(np.empty(0, np.uint64), np.empty(0, np.int64))]
    bands = [*exact]
    for group in reader.read(report):
        codes.extend(CODES.get(each.reason, 0) for each in group.documents)
        positions = np.array([each.position for each in group.kept], np.int64)
        exact.append((np.array([_exact_key(each) for each in group.kept], np.uint64), positions))
        if group.words is not None and reader.quality.finds_near_duplicates:
            shingles = shingles_of(group.words)
            [filled] = np.nonzero(np.diff(shingles.ends, prepend=0))
            keys = band_keys(signatures_of(shingles)[filled])
            bands.append((keys.ravel(), np.repeat(positions[filled], BANDS)))
    folder, number = reader.job.stages, reader.unit.number
    for name, found in ((duplicates.EXACT, exact), (duplicates.BANDS, bands)):
        write_run(folder / name.format(number), *(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
    atomic_write_text(folder / duplicates.VERDICTS.format(number), bytes(codes))


def _exact_key(candidate: CandidateDocument) -> int:
    prompt = candidate.document.prompt.encode()
    digest = hashlib.blake2b(candidate.content, digest_size=8, key=hashlib.sha256(prompt).digest() if prompt else b"")
    return int.from_bytes(digest.digest(), "little")


def _count_lines(reader: UnitReader, report: ReportProgress) -> None:
    """Writes the lines of the documents that are kept, with the number of documents that have each.

    The lines of a document with many copies are not boilerplate, so copies that are removed do not count.
    """
    found = [np.empty(0, np.uint64)]
    for group in reader.read(report):
        found += [np.unique(_lines_of(each.content)[1]) for each in group.kept]
    keys, counts = np.unique(np.concatenate(found), return_counts=True)
    is_line = keys > 0
    write_run(reader.job.stages / LINES.format(reader.unit.number), keys[is_line], counts[is_line])


def _lines_of(content: bytes) -> tuple[list[bytes], Hashes]:
    """Returns the lines of a text with their line breaks, and the hash of each without white space around it; 0 for short lines."""
    lines = io.BytesIO(content).readlines()
    visible = (line.strip(SPACES) for line in lines)
    digests = (hashlib.blake2b(each, digest_size=8).digest() if len(each) >= MIN_LINE else bytes(8) for each in visible)
    return lines, np.frombuffer(b"".join(digests), "<u8")


class KeptDocuments:
    """Reads the documents of a work unit that are kept, in chunks, and counts all of them."""

    def __init__(self, reader: UnitReader, merged: duplicates.Merged | None) -> None:
        self.reader = reader
        repeated: Path = reader.job.stages / REPEATED
        self.repeated = np.fromfile(repeated, "<u8") if reader.quality.repeated_lines else np.empty(0, np.uint64)
        pairs = [pair for pairs in merged.examples.values() for pair in pairs] if merged else []
        # Positions of examples of duplicates.
        self.wanted = {place[1] for pair in pairs for place in pair if place[0] == reader.unit.number}
        self.excerpts: dict[str, dict[str, str]] = {}  # of the wanted positions

    def __call__(self, span: FileSpan, bad: OnBadRecord | None) -> Iterator[Document]:
        """Yields the chunks of a span's documents."""
        reader, unreported = self.reader, 0
        for group in reader.read_span(span, bad):
            for each in group.documents:
                self._count(each)
                if each.text and not each.reason and len(self.repeated):
                    self._remove_lines(each)
                unreported += each.document.size
                if not each.reason:
                    if each.text:
                        reader.add(KEPT, len(each.content))
                    yield from chunks_of(replace(each.document, text=each.text, size=unreported))
                    unreported = 0

    def _count(self, candidate: CandidateDocument) -> None:
        """Counts a document before lines are removed from it."""
        text, reason = candidate.document.text, candidate.reason
        if candidate.position in self.wanted:
            self.excerpts[str(candidate.position)] = {"where": candidate.where, "text": text[:EXCERPT]}
        if text:
            self.reader.add(READ, candidate.num_bytes)
            if reason.endswith("duplicates"):
                self.reader.add(reason, candidate.num_bytes)
            elif not reason and candidate.text is not text:
                self.reader.add(CHANGED, candidate.num_bytes - len(candidate.content))

    def _remove_lines(self, candidate: CandidateDocument) -> None:
        """Removes the lines that many documents have, or the document if most of it are such lines."""
        content = candidate.content
        lines, hashes = _lines_of(content)
        at = np.minimum(np.searchsorted(self.repeated, hashes), len(self.repeated) - 1)
        is_repeated = self.repeated[at] == hashes
        if not is_repeated.any():
            return
        rest = b"".join(line for line, remove in zip(lines, is_repeated.tolist(), strict=True) if not remove)
        num_bytes = len(content) - len(rest)
        visible, left = (len(each.translate(None, SPACES)) for each in (content, rest))
        if visible - left > MAX_REMOVED * visible or not left:
            candidate.reason, num_bytes = "boilerplate", candidate.num_bytes
        else:
            candidate.text, candidate.content = rest.decode(), rest
        line = lines[int(is_repeated.argmax())].decode().strip()
        self.reader.add_example(candidate, candidate.reason or CLEANED, num_bytes, f"removed line: {line[:EXCERPT]}")


def build_report(results: Sequence[WorkUnitResult], job: WorkerOptions) -> dict[str, Any]:
    """Returns the content of `report.json`, when all passes are finished."""
    units = [result.unit for result in results]
    tallies, excerpts = dict[str, Tally](), dict[tuple[int, int], dict[str, str]]()
    merged = duplicates.read_merged(job.stages)
    for stage in ("tokenize", "duplicates") if merged else ("tokenize",):
        for unit in units:
            found = json.loads((job.stages / RESULT.format(stage, unit)).read_text())
            for reason, tally in found["tallies"].items():
                tallies.setdefault(reason, Tally()).add(Tally(**tally))
            excerpts |= {(unit, int(position)): excerpt for position, excerpt in found.get("excerpts", {}).items()}
    num_documents = sum(shard.documents for result in results for shard in result.splits.values())
    counted = Tally(num_documents, sum(result.text_bytes for result in results))
    if merged is None:
        parts = merge([job.stages / COPIES.format(unit) for unit in units])
        copies = {"exact": num_documents - sum(len(np.unique(part.keys)) for part in parts)}
    else:
        copies = {"exact": merged.exact} | ({"near": merged.near} if job.quality.finds_near_duplicates else {})
        for reason, pairs in merged.examples.items():
            if reason in tallies:
                tallies[reason].examples = [_example(*(excerpts[unit, at] for unit, at in pair)) for pair in pairs]
        tallies = dict(sorted(tallies.items(), key=lambda item: CODES.get(item[0], 0)))
    documents = {kind: tallies.pop(kind) for kind in (READ, KEPT, CHANGED, CLEANED) if kind in tallies}
    for kind in (READ, KEPT):
        documents.setdefault(kind, Tally() if job.quality.reads_documents else counted)
    for tally in [*documents.values(), *tallies.values()]:
        tally.examples = [{name: each[name] for name in ("where", "text", "detail")} for each in tally.examples]
    return {
        "format": FORMAT,
        "options": job.quality.parameters(),
        "documents": {kind: vars(tally) for kind, tally in documents.items()},
        "removed": {reason: vars(tally) for reason, tally in tallies.items()},
        "duplicates": copies,
    }


def _example(copy: dict[str, str], kept: dict[str, str]) -> dict[str, Any]:
    text = "" if copy["text"] == kept["text"] else f", which begins: {' '.join(kept['text'].split())}"
    return {**copy, "detail": f"kept: {kept['where']}{text}"}
