"""The last pass: yields the documents that are kept to the tokenizer, and counts all of them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from titanlike.data.documents.readers import Document, OnBadRecord, chunks_of
from titanlike.data.tokens.tokenization import FileSpan
from titanlike.tools.data.quality.candidates import Candidate, order_of, survivors
from titanlike.tools.data.quality.hashing import Hashes
from titanlike.tools.data.quality.lines import remove_lines
from titanlike.tools.data.quality.options import Job
from titanlike.tools.data.quality.report import EXCERPT, Tallies, Tally, Verdicts

READ, KEPT, CHANGED, CLEANED = "read", "kept", "changed", "cleaned"  # tallies of documents that are not removed


class KeptDocuments:
    """Reads the documents of a work unit that are kept, in chunks."""

    def __init__(
        self, unit: int, job: Job, verdicts: Verdicts | None, repeated: Hashes | None, wanted: set[int]
    ) -> None:
        self.unit, self.job = unit, job
        self.verdicts, self.repeated, self.wanted = verdicts, repeated, wanted
        self.tallies: Tallies = {}
        self.excerpts: dict[str, dict[str, Any]] = {}  # of the wanted positions
        self.position = 0  # of the next span's first document

    def __call__(self, span: FileSpan, bad: OnBadRecord | None) -> Iterator[Document]:
        """Yields the chunks of a span's documents."""
        unreported = 0
        for candidate, reason in survivors(span, self.unit, self.job, self.position, self.verdicts, self.tallies, bad):
            self.position = candidate.position + 1
            if candidate.position in self.wanted:
                self.excerpts[str(candidate.position)] = {
                    "where": candidate.where,
                    "text": candidate.document.text[:EXCERPT],
                }
            unreported += candidate.document.size
            if not candidate.document.text:
                yield replace(candidate.document, size=unreported)
                unreported = 0
                continue
            self._count(READ, candidate.num_bytes)
            if reason:
                if self.verdicts is not None and reason.endswith(
                    "duplicates"
                ):  # the others were counted with the verdicts
                    self._count(reason, candidate.num_bytes)
                continue
            if candidate.text is not candidate.document.text:
                self._count(CHANGED, candidate.num_bytes - len(candidate.content))
            if not self._clean(candidate):
                continue
            self._count(KEPT, len(candidate.content))
            yield from chunks_of(replace(candidate.document, text=candidate.text, size=unreported))
            unreported = 0

    def _clean(self, candidate: Candidate) -> bool:
        """Removes repeated lines. Returns whether the document is kept."""
        cleaned = remove_lines(candidate, self.repeated) if self.repeated is not None else None
        if cleaned is None:
            return True
        reason = "boilerplate" if cleaned.dominated else CLEANED
        tally, order = self.tallies.setdefault(reason, Tally()), order_of(self.unit, candidate.position)
        num_bytes = candidate.num_bytes if cleaned.dominated else cleaned.removed_bytes
        example = candidate.example(order, f"removed line: {cleaned.removed[:EXCERPT]}") if tally.wants(order) else None
        tally.count(num_bytes, example)
        return not cleaned.dominated

    def _count(self, name: str, num_bytes: int) -> None:
        self.tallies.setdefault(name, Tally()).count(num_bytes)
