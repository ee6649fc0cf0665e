"""Reads complete documents, applies the filters to them and counts what they remove."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from titanlike.config import UserError
from titanlike.data.documents.readers import Document, OnBadRecord, read_chunks
from titanlike.data.documents.records import KINDS, PARQUET, count_lines, name_of_record, open_parquet, row_groups
from titanlike.data.tokens.tokenization import FileSpan
from titanlike.tools.data.quality.filters import Verdict, judge, judge_words
from titanlike.tools.data.quality.hashing import GROUP, Words, mix, select, words_of
from titanlike.tools.data.quality.options import Quality, WorkerOptions
from titanlike.tools.data.quality.report import EXCERPT, REASON_OF, Example, Tallies, Tally, Verdicts


@dataclass
class CandidateDocument:
    """A document of a work unit, with the text that the filter of one's own made of it."""

    position: int  # in the work unit
    span: FileSpan
    document: Document
    text: str
    content: bytes  # the text as UTF-8
    num_bytes: int  # of the text before it was filtered

    @property
    def where(self) -> str:
        """The file of the document, and its line or row."""
        span, number = self.span, self.document.record + 1
        if span.file.kind not in KINDS:
            return span.file.name
        after = "row group {}" if span.file.kind == PARQUET else "byte {:,}"
        begin = span.bounds[0] if span.bounds else 0
        return f"{span.file.name}, {name_of_record(span.file)} {number}" + (
            f" after {after.format(begin)}" if begin else ""
        )

    def example(self, order: int, detail: str = "") -> Example:
        return Example(order, self.where, self.text[:EXCERPT], detail)


def skip_bad(job: WorkerOptions) -> OnBadRecord | None:
    """Returns what is done with a bad record before tokenization, which counts those that are skipped."""
    return (lambda _: None) if job.skip_bad_records else None


def order_of(unit: int, position: int) -> int:
    """Returns a hash of the position of a document, by which examples are drawn."""
    return int(mix(np.array([unit << 32 | position], np.uint64))[0] >> np.uint64(1))


def read_candidates(
    span: FileSpan, job: WorkerOptions, first: int, bad: OnBadRecord | None
) -> Iterator[CandidateDocument]:
    """Reads the documents of a span, also those without text. `first` is the position of the first one in the work unit."""
    fields = replace(job.fields, whole_record=job.quality.own is not None and job.quality.own.takes_record)
    chunks: list[Document] = []
    for chunk in read_chunks(span.file, fields, span=span.bounds, bad=bad):
        chunks.append(chunk)
        if chunk.last:
            document, text = chunks[0], "".join(each.text for each in chunks)
            document = replace(document, text=text, size=sum(each.size for each in chunks), last=True)
            content = text.encode()
            yield CandidateDocument(first, span, document, text, content, len(content))
            first += 1
            chunks = []


def grouped(candidates: Iterator[CandidateDocument]) -> Iterator[list[CandidateDocument]]:
    """Groups documents, so that numpy's calls are for many short ones."""
    group: list[CandidateDocument] = []
    size = 0
    for candidate in candidates:
        group.append(candidate)
        size += len(candidate.content)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def position_of(span: FileSpan, record: int) -> str:
    """Names a record of a span for an error message: its file, and its line or row."""
    file, begin = span.file, span.bounds[0] if span.bounds else 0
    if file.kind == PARQUET:
        with open_parquet(file) as table:
            return f"{file.name}, row {sum(row_groups(table)[:begin]) + record + 1}"
    if file.kind not in KINDS:
        return file.name
    before = count_lines(file, begin - 1) + 1 if begin else 0  # lines that begin before the span
    return f"{file.name}, {name_of_record(file)} {before + record + 1}"


def apply_own_filter(candidate: CandidateDocument, quality: Quality) -> bool:
    """Replaces the text by the result of the filter of one's own. Returns whether the document is kept."""
    if quality.own is None or not candidate.text:
        return True
    record: dict[str, Any] | None = candidate.document.fields
    if record is None and quality.own.takes_record:
        record = {"text": candidate.text}  # of a text file
    span = candidate.span

    def where() -> str:
        return position_of(span, candidate.document.record)

    text = quality.own.apply(candidate.text, record, where)
    if text is None:
        return False
    if text != candidate.text:
        candidate.text, candidate.content = text, text.encode()
    return True


class Filtered(NamedTuple):
    """A group of documents after the filters."""

    reasons: list[str]  # for which each is removed; "" for those that are kept
    kept: list[CandidateDocument]  # that have text
    words: Words | None  # of those that are kept


def filter_group(
    group: Sequence[CandidateDocument], unit: int, quality: Quality, tallies: Tallies, *, with_words: bool = False
) -> Filtered:
    """Applies all filters to documents, and counts what they remove."""
    verdicts: list[Verdict | None] = [None] * len(group)
    for number, candidate in enumerate(group):
        if not apply_own_filter(candidate, quality):
            verdicts[number] = Verdict("filter", "")
        elif quality.limits and candidate.text:
            verdicts[number] = judge(candidate.text, candidate.content, quality.limits)
    rest = [number for number, candidate in enumerate(group) if candidate.text and not verdicts[number]]
    words = words_of([_folded(group[number]) for number in rest]) if rest and (quality.limits or with_words) else None
    if words and quality.limits:
        judged = list(judge_words(words, quality.limits))
        for number, verdict in zip(rest, judged, strict=True):
            verdicts[number] = verdict
        words = select(words, [verdict is None for verdict in judged])
    for candidate, verdict in zip(group, verdicts, strict=True):
        if verdict:
            tally, order = tallies.setdefault(verdict.reason, Tally()), order_of(unit, candidate.position)
            candidate.text = candidate.document.text
            tally.count(candidate.num_bytes, candidate.example(order, verdict.detail) if tally.wants(order) else None)
    kept = [group[number] for number in rest if verdicts[number] is None]
    return Filtered([verdict.reason if verdict else "" for verdict in verdicts], kept, words)


def survivors(
    span: FileSpan,
    unit: int,
    job: WorkerOptions,
    first: int,
    verdicts: Verdicts | None,
    tallies: Tallies,
    bad: OnBadRecord | None,
) -> Iterator[list[tuple[CandidateDocument, str]]]:
    """Yields the documents of a span in groups, with the reason for which each is removed, "" for those that are kept. That is
    decided here, unless an earlier stage has written its verdicts."""
    for group in grouped(read_candidates(span, job, first, bad)):
        if verdicts is None:
            yield list(zip(group, filter_group(group, unit, job.quality, tallies).reasons, strict=True))
            continue
        for candidate in group:
            code = int(verdicts[candidate.position])
            if not code and not apply_own_filter(candidate, job.quality):
                assert job.quality.own is not None
                raise UserError(
                    f"{candidate.where}: --filter {job.quality.own.name} kept this document first and now removes it; "
                    "its result must depend on its argument only"
                )
        yield [(each, REASON_OF.get(int(verdicts[each.position]), "")) for each in group]


def _folded(candidate: CandidateDocument) -> bytes:
    """Returns the text in lower case, where that is more than the hashes of words do themselves."""
    return candidate.content if candidate.content.isascii() else candidate.text.lower().encode()
