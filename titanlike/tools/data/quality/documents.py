"""Reads complete documents, applies the filters to them and counts what they remove."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from titanlike.config import UserError
from titanlike.data.documents.readers import Document, OnBadRecord, read_chunks
from titanlike.data.documents.records import KINDS, LINES, PARQUET, is_array
from titanlike.data.tokens.tokenization import FileSpan, ReportProgress, WorkUnit, check_unchanged
from titanlike.tools.data.quality.filters import Verdict, judge, judge_words
from titanlike.tools.data.quality.hashing import GROUP, Words, select, words_of
from titanlike.tools.data.quality.options import WorkerOptions
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
    detail: str = ""

    @property
    def where(self) -> str:
        """The file of the document, and its line or row."""
        span = self.span
        if span.file.kind not in KINDS:
            return span.file.name
        begin = span.bounds[0] if span.bounds else 0
        after = "row group {}" if span.file.kind == PARQUET else "byte {:,}"
        place = f"{span.file.name}, {_name_of_record(span)} {self.document.record + 1}"
        return f"{place} after {after.format(begin)}" if begin else place

    def remove(self, verdict: Verdict | None) -> None:
        """Marks the document as removed if there is a verdict."""
        if verdict:
            self.reason, self.detail = verdict


@dataclass
class Group:
    """Consecutive documents of a span. numpy's calls are for many short ones."""

    documents: list[CandidateDocument]
    words: Words | None = None  # of those that are kept

    @property
    def kept(self) -> list[CandidateDocument]:
        """The documents that are kept and have text."""
        return [each for each in self.documents if each.text and not each.reason]


class UnitReader:
    """Reads the documents of a work unit in groups, with the reasons for which they are removed. Counts what it removes itself.

    With `verdicts`, an earlier pass has decided which documents are kept.
    """

    def __init__(self, unit: WorkUnit, job: WorkerOptions, verdicts: Verdicts | None) -> None:
        self.unit, self.job, self.quality, self.verdicts = unit, job, job.quality, verdicts
        self.tallies: Tallies = {}
        self._position = 0  # of the next document

    def read(self, report: ReportProgress) -> Iterator[Group]:
        """Yields all documents before tokenization, which counts the bad records that are skipped."""
        bad: OnBadRecord | None = (lambda _: None) if self.job.skip_bad_records else None
        for span in self.unit.spans:
            unread = span.size
            for group in self.read_span(span, bad):
                yield group
                read = min(sum(each.document.size for each in group.documents), unread)
                unread -= read
                report(read, 0)
            check_unchanged(span.file)
            report(unread, 0)

    def read_span(self, span: FileSpan, bad: OnBadRecord | None) -> Iterator[Group]:
        """Yields the documents of the next span, also those without text."""
        for group in self._groups(span, bad):
            if self.verdicts is None:
                self._filter(group)
            else:
                for each in group.documents:
                    each.reason = REASON_OF.get(int(self.verdicts[each.position]), "")
                    if not each.reason and not self._apply_own_filter(each):
                        assert self.quality.own is not None
                        raise UserError(
                            f"{each.where}: --filter {self.quality.own.name} kept this document first and now removes it; "
                            "its result must depend on its argument only"
                        )
            yield group

    def add(self, reason: str, num_bytes: int) -> None:
        """Counts a document for a reason."""
        self.tallies.setdefault(reason, Tally()).add(Tally(1, num_bytes))

    def add_example(self, each: CandidateDocument, reason: str, num_bytes: int, detail: str) -> None:
        """Counts a document for a reason, perhaps as an example."""
        [order] = orders_of([self.unit.number], [each.position]).tolist()
        example = {"order": order, "where": each.where, "text": each.text[:EXCERPT], "detail": detail}
        self.tallies.setdefault(reason, Tally()).add(Tally(1, num_bytes, [example]))

    def _groups(self, span: FileSpan, bad: OnBadRecord | None) -> Iterator[Group]:
        own = self.quality.own
        fields = replace(self.job.fields, whole_record=own is not None and own.takes_record)
        chunks: list[Document] = []
        group, size = Group([]), 0
        for chunk in read_chunks(span.file, fields, span=span.bounds, bad=bad):
            chunks.append(chunk)
            if chunk.last:
                text = "".join(each.text for each in chunks)
                document = replace(chunks[0], text=text, size=sum(each.size for each in chunks), last=True)
                content = text.encode()
                group.documents.append(CandidateDocument(self._position, span, document, text, content, len(content)))
                self._position, size, chunks = self._position + 1, size + len(content), []
                if size >= GROUP:
                    yield group
                    group, size = Group([]), 0
        if group.documents:
            yield group

    def _filter(self, group: Group) -> None:
        """Applies all filters to documents, and counts what they remove."""
        limits = self.quality.limits
        for each in group.documents:
            if not self._apply_own_filter(each):
                each.reason = "filter"
            elif limits and each.text:
                each.remove(judge(each.text, each.content, limits))
        rest = group.kept
        if rest and (limits or self.quality.finds_near_duplicates):
            # The hashes ignore the case of ASCII letters themselves.
            folded = [each.content if each.content.isascii() else each.text.lower().encode() for each in rest]
            group.words = words_of(folded)
            if limits:
                for each, verdict in zip(rest, judge_words(group.words, limits), strict=True):
                    each.remove(verdict)
                group.words = select(group.words, [not each.reason for each in rest])
        for each in group.documents:
            if each.reason:
                each.text = each.document.text
                self.add_example(each, each.reason, each.num_bytes, each.detail)

    def _apply_own_filter(self, candidate: CandidateDocument) -> bool:
        """Replaces the text by the result of the filter of one's own. Returns whether the document is kept."""
        if self.quality.own is None or not candidate.text:
            return True
        record = candidate.document.fields or {"text": candidate.text}  # of a text file
        try:
            text = self.quality.own.apply(candidate.text, record)
        except UserError as error:
            raise UserError(f"{candidate.where}: {error}") from error
        if text is None:
            return False
        if text != candidate.text:
            candidate.text, candidate.content = text, text.encode()
        return True


def _name_of_record(span: FileSpan) -> str:
    if span.file.kind not in LINES:
        return "row"
    return "record" if is_array(span.file) else "line"
