"""Reads complete documents, applies the filters to them and counts what they remove."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from titanlike.config import UserError
from titanlike.data.documents.readers import Document, OnBadRecord, read_chunks
from titanlike.data.documents.records import KINDS, PARQUET, count_lines, name_of_record, open_parquet, row_groups
from titanlike.data.tokens.tokenization import FileSpan, ReportProgress, WorkUnit, check_unchanged
from titanlike.tools.data.quality.filters import Verdict, judge, judge_words
from titanlike.tools.data.quality.hashing import GROUP, Words, select, words_of
from titanlike.tools.data.quality.options import Quality, WorkerOptions
from titanlike.tools.data.quality.report import EXCERPT, REASON_OF, Tallies, Tally, Verdicts, orders_of


@dataclass
class CandidateDocument:
    """A document of a work unit, with the text that the filter of one's own made of it."""

    position: int  # in the work unit
    span: FileSpan
    document: Document
    text: str
    content: bytes  # the text as UTF-8
    num_bytes: int  # of the text before it was filtered
    reason: str = ""  # for which it is removed; "" if it is kept

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

    def count(self, tallies: Tallies, reason: str, unit: int, num_bytes: int, detail: str) -> None:
        """Counts the document for a reason, perhaps as an example."""
        [order] = orders_of([unit], [self.position]).tolist()
        example = {"order": order, "where": self.where, "text": self.text[:EXCERPT], "detail": detail}
        tallies.setdefault(reason, Tally()).count(num_bytes, example)


@dataclass
class Group:
    """Consecutive documents of a span. numpy's calls are for many short ones."""

    documents: list[CandidateDocument]
    words: Words | None = None  # of those that are kept

    @property
    def kept(self) -> list[CandidateDocument]:
        """The documents that are kept and have text."""
        return [each for each in self.documents if each.text and not each.reason]


def read_unit(
    unit: WorkUnit,
    job: WorkerOptions,
    verdicts: Verdicts | None,
    tallies: Tallies,
    report: ReportProgress,
    *,
    with_words: bool = False,
) -> Iterator[Group]:
    """Yields the documents of a work unit before tokenization, which counts the bad records that are skipped."""
    first = 0
    for span in unit.spans:
        unread = span.size
        bad: OnBadRecord | None = (lambda _: None) if job.skip_bad_records else None
        for group in read_span(span, unit.number, job, first, verdicts, tallies, bad, with_words=with_words):
            first += len(group.documents)
            yield group
            read = min(sum(each.document.size for each in group.documents), unread)
            unread -= read
            report(read, 0)
        check_unchanged(span.file)
        report(unread, 0)


def read_span(
    span: FileSpan,
    unit: int,
    job: WorkerOptions,
    first: int,
    verdicts: Verdicts | None,
    tallies: Tallies,
    bad: OnBadRecord | None,
    *,
    with_words: bool = False,
) -> Iterator[Group]:
    """Yields the documents of a span, also those without text, with the reasons for which they are removed. They are decided here,
    unless an earlier stage has written its verdicts. `first` is the position of the first document in the work unit."""
    for group in _grouped(span, job, first, bad):
        if verdicts is None:
            _filter(group, unit, job.quality, tallies, with_words=with_words)
            yield group
            continue
        for each in group.documents:
            each.reason = REASON_OF.get(int(verdicts[each.position]), "")
            if not each.reason and not _apply_own_filter(each, job.quality):
                assert job.quality.own is not None
                raise UserError(
                    f"{each.where}: --filter {job.quality.own.name} kept this document first and now removes it; "
                    "its result must depend on its argument only"
                )
        yield group


def _grouped(span: FileSpan, job: WorkerOptions, position: int, bad: OnBadRecord | None) -> Iterator[Group]:
    fields = replace(job.fields, whole_record=job.quality.own is not None and job.quality.own.takes_record)
    chunks: list[Document] = []
    group, size = Group([]), 0
    for chunk in read_chunks(span.file, fields, span=span.bounds, bad=bad):
        chunks.append(chunk)
        if chunk.last:
            text = "".join(each.text for each in chunks)
            document = replace(chunks[0], text=text, size=sum(each.size for each in chunks), last=True)
            content = text.encode()
            group.documents.append(CandidateDocument(position, span, document, text, content, len(content)))
            position, size, chunks = position + 1, size + len(content), []
            if size >= GROUP:
                yield group
                group, size = Group([]), 0
    if group.documents:
        yield group


def _filter(group: Group, unit: int, quality: Quality, tallies: Tallies, *, with_words: bool) -> None:
    """Applies all filters to documents, and counts what they remove."""
    details: dict[int, str] = {}

    def remove(each: CandidateDocument, verdict: Verdict | None) -> None:
        if verdict:
            each.reason, details[each.position] = verdict.reason, verdict.detail

    for each in group.documents:
        if not _apply_own_filter(each, quality):
            remove(each, Verdict("filter", ""))
        elif quality.limits and each.text:
            remove(each, judge(each.text, each.content, quality.limits))
    rest = group.kept
    if rest and (quality.limits or with_words):
        group.words = words_of([_folded(each) for each in rest])
        if quality.limits:
            for each, verdict in zip(rest, judge_words(group.words, quality.limits), strict=True):
                remove(each, verdict)
            group.words = select(group.words, [not each.reason for each in rest])
    for each in group.documents:
        if each.reason:
            each.text = each.document.text
            each.count(tallies, each.reason, unit, each.num_bytes, details[each.position])


def _folded(candidate: CandidateDocument) -> bytes:
    """Returns the text in lower case, where that is more than the hashes of words do themselves."""
    return candidate.content if candidate.content.isascii() else candidate.text.lower().encode()


def _apply_own_filter(candidate: CandidateDocument, quality: Quality) -> bool:
    """Replaces the text by the result of the filter of one's own. Returns whether the document is kept."""
    if quality.own is None or not candidate.text:
        return True
    record: dict[str, Any] = candidate.document.fields or {"text": candidate.text}  # of a text file
    text = quality.own.apply(candidate.text, record, lambda: _position_of(candidate.span, candidate.document.record))
    if text is None:
        return False
    if text != candidate.text:
        candidate.text, candidate.content = text, text.encode()
    return True


def _position_of(span: FileSpan, record: int) -> str:
    """Names a record of a span for an error message: its file, and its line or row."""
    file, begin = span.file, span.bounds[0] if span.bounds else 0
    if file.kind == PARQUET:
        with open_parquet(file) as table:
            return f"{file.name}, row {sum(row_groups(table)[:begin]) + record + 1}"
    if file.kind not in KINDS:
        return file.name
    before = count_lines(file, begin - 1) + 1 if begin else 0  # lines that begin before the span
    return f"{file.name}, {name_of_record(file)} {before + record + 1}"
