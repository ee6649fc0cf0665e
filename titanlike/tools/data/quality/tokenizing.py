"""The last pass: yields the documents that are kept to the tokenizer, and counts all of them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from titanlike.data.documents.readers import Document, OnBadRecord, chunks_of
from titanlike.data.tokens.tokenization import FileSpan
from titanlike.tools.data.quality.candidates import CandidateDocument, order_of, survivors
from titanlike.tools.data.quality.hashing import Hashes
from titanlike.tools.data.quality.lines import Cleaned, remove_lines
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import EXCERPT, Tallies, Tally, Verdicts

READ, KEPT, CHANGED, CLEANED = "read", "kept", "changed", "cleaned"  # tallies of documents that are not removed


class KeptDocuments:
    """Reads the documents of a work unit that are kept, in chunks."""

    def __init__(
        self, unit: int, job: WorkerOptions, verdicts: Verdicts | None, repeated: Hashes | None, wanted: set[int]
    ) -> None:
        self.unit, self.job = unit, job
        self.verdicts, self.repeated, self.wanted = verdicts, repeated, wanted
        self.tallies: Tallies = {}
        self.excerpts: dict[str, dict[str, Any]] = {}  # of the wanted positions
        self.position = 0  # of the next span's first document

    def __call__(self, span: FileSpan, bad: OnBadRecord | None) -> Iterator[Document]:
        """Yields the chunks of a span's documents."""
        unreported = 0
        for group in survivors(span, self.unit, self.job, self.position, self.verdicts, self.tallies, bad):
            self.position += len(group)
            for candidate, reason in group:
                self._excerpt(candidate)
                self._count_candidate(candidate, reason)
            kept = [candidate for candidate, reason in group if not reason]
            cleaned = (
                remove_lines([each for each in kept if each.text], self.repeated) if self.repeated is not None else {}
            )
            for candidate in kept:
                unreported += candidate.document.size
                if candidate.position in cleaned and not self._clean(candidate, cleaned[candidate.position]):
                    continue
                if candidate.text:
                    self._count(KEPT, len(candidate.content))
                yield from chunks_of(replace(candidate.document, text=candidate.text, size=unreported))
                unreported = 0
            unreported += sum(candidate.document.size for candidate, reason in group if reason)

    def _excerpt(self, candidate: CandidateDocument) -> None:
        if candidate.position in self.wanted:
            text = candidate.document.text[:EXCERPT]
            self.excerpts[str(candidate.position)] = {"where": candidate.where, "text": text}

    def _count_candidate(self, candidate: CandidateDocument, reason: str) -> None:
        """Counts a document before lines are removed from it."""
        if not candidate.document.text:
            return
        self._count(READ, candidate.num_bytes)
        if reason:
            if self.verdicts is not None and reason.endswith("duplicates"):  # the others were counted with the verdicts
                self._count(reason, candidate.num_bytes)
        elif candidate.text is not candidate.document.text:
            self._count(CHANGED, candidate.num_bytes - len(candidate.content))

    def _clean(self, candidate: CandidateDocument, cleaned: Cleaned) -> bool:
        """Counts a document that has repeated lines. Returns whether it is kept."""
        reason = "boilerplate" if cleaned.dominated else CLEANED
        tally, order = self.tallies.setdefault(reason, Tally()), order_of(self.unit, candidate.position)
        num_bytes = candidate.num_bytes if cleaned.dominated else cleaned.removed_bytes
        example = candidate.example(order, f"removed line: {cleaned.removed[:EXCERPT]}") if tally.wants(order) else None
        tally.count(num_bytes, example)
        return not cleaned.dominated

    def _count(self, name: str, num_bytes: int) -> None:
        self.tallies.setdefault(name, Tally()).count(num_bytes)
