"""What a worker process does with a work unit in each pass, and what happens between the passes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from titanlike.data.documents.readers import Document, OnBadRecord, chunks_of
from titanlike.data.tokens.tokenization import FileSpan, ReportProgress, WorkUnit, WorkUnitResult, tokenize
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.tools.data.quality import duplicates, lines
from titanlike.tools.data.quality.candidates import CandidateDocument, read_span
from titanlike.tools.data.quality.hashing import Hashes
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import CODES, EXCERPT, Tallies, Tally, report_of
from titanlike.tools.data.quality.runs import merge, write_run
from titanlike.utils.atomic_write import atomic_write_text, fsync_directory

READ, KEPT, CHANGED, CLEANED = "read", "kept", "changed", "cleaned"  # tallies of documents that are not removed
COPIES, RESULT = "copies-{:05d}", "{}-{:05d}.json"


def process(unit: WorkUnit, job: WorkerOptions, tokenizer: Tokenizer, report: ReportProgress) -> WorkUnitResult | None:
    """Does the pass `job.stage` over a work unit. Returns the result of tokenization; the other passes write files only."""
    result, found = None, dict[str, Any]()
    if job.stage == "duplicates":
        found["tallies"] = _to_json(duplicates.find_keys(unit, job, report))
    else:
        documents = KeptDocuments(unit.number, job)
        if job.stage == "lines":
            lines.count_lines(unit, job, documents.verdicts, report)
        else:
            result = tokenize(unit, job, tokenizer, report, documents if job.quality.reads_documents else None)
            found = {"tallies": _to_json(documents.tallies), "excerpts": documents.excerpts}
            keys = np.unique(np.array(result.hashes, np.uint64))
            write_run(job.stages / COPIES.format(unit.number), keys, np.zeros(len(keys)))
            result.hashes = None  # the results of all work units are in memory together
    fsync_directory(job.stages)  # a result is durable after what it says to be there
    atomic_write_text(job.stages / RESULT.format(job.stage, unit.number), json.dumps(found))
    fsync_directory(job.stages)
    return result


def is_finished(unit: int, job: WorkerOptions) -> bool:
    """Whether an earlier start wrote what the pass `job.stage` writes for a work unit, besides the result of tokenization."""
    return (job.stages / RESULT.format(job.stage, unit)).exists()


def finish_stage(units: Sequence[WorkUnit], job: WorkerOptions) -> None:
    """Joins what the work units of a pass wrote, for the next one."""
    if job.stage == "duplicates":
        duplicates.merge_keys(job, len(units))
    elif job.stage == "lines":
        lines.merge_lines(job, len(units))


class KeptDocuments:
    """Reads the documents of a work unit that are kept, in chunks, and counts all of them."""

    def __init__(self, unit: int, job: WorkerOptions) -> None:
        self.unit, self.job = unit, job
        merged = duplicates.read_merged(job.stages)
        self.verdicts = duplicates.read_verdicts(job.stages, merged, unit) if merged else None
        self.repeated: Hashes = np.empty(0, np.uint64)
        if job.stage == "tokenize" and job.quality.repeated_lines:
            self.repeated = lines.read_repeated(job.stages)
        pairs = [pair for pairs in merged.examples.values() for pair in pairs] if merged else []
        self.wanted = {place[1] for pair in pairs for place in pair if place[0] == unit}  # examples of duplicates
        self.tallies: Tallies = {}
        self.excerpts: dict[str, dict[str, str]] = {}  # of the wanted positions
        self.position = 0  # of the next span's first document

    def __call__(self, span: FileSpan, bad: OnBadRecord | None) -> Iterator[Document]:
        """Yields the chunks of a span's documents."""
        unreported = 0
        for group in read_span(span, self.unit, self.job, self.position, self.verdicts, self.tallies, bad):
            self.position += len(group.documents)
            for each in group.documents:
                self._count(each)
            for each, num_bytes, line in lines.remove_lines(group.kept, self.repeated):
                counted = each.num_bytes if each.reason else num_bytes
                each.count(self.tallies, each.reason or CLEANED, self.unit, counted, f"removed line: {line[:EXCERPT]}")
            for each in group.documents:
                unreported += each.document.size
                if not each.reason:
                    if each.text:
                        self._add(KEPT, len(each.content))
                    yield from chunks_of(replace(each.document, text=each.text, size=unreported))
                    unreported = 0

    def _count(self, candidate: CandidateDocument) -> None:
        """Counts a document before lines are removed from it."""
        text, reason = candidate.document.text, candidate.reason
        if candidate.position in self.wanted:
            self.excerpts[str(candidate.position)] = {"where": candidate.where, "text": text[:EXCERPT]}
        if text:
            self._add(READ, candidate.num_bytes)
            if self.verdicts is not None and reason.endswith("duplicates"):  # the others were counted with the verdicts
                self._add(reason, candidate.num_bytes)
            elif not reason and candidate.text is not text:
                self._add(CHANGED, candidate.num_bytes - len(candidate.content))

    def _add(self, name: str, num_bytes: int) -> None:
        self.tallies.setdefault(name, Tally()).count(num_bytes)


def build_report(results: Sequence[WorkUnitResult], job: WorkerOptions) -> dict[str, Any]:
    """Returns the report, when all passes are finished."""
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
    documents = {kind: tallies.pop(kind) for kind in (READ, KEPT, CHANGED, CLEANED) if kind in tallies}
    for kind in (READ, KEPT):
        documents.setdefault(kind, Tally() if job.quality.reads_documents else counted)
    if merged is None:
        parts = merge([job.stages / COPIES.format(unit) for unit in units])
        counts = {"exact": num_documents - sum(len(np.unique(part.keys)) for part in parts)}
    else:
        counts = {"exact": merged.exact} | ({"near": merged.near} if job.quality.finds_near_duplicates else {})
        for reason, pairs in merged.examples.items():
            if reason in tallies:
                examples = [[excerpts[unit, position] for unit, position in pair] for pair in pairs]
                tallies[reason].examples = [_example(*pair) for pair in examples]
        tallies = dict(sorted(tallies.items(), key=lambda item: CODES[item[0]]))
    return report_of(job.quality.parameters(), documents, tallies, counts)


def _example(copy: dict[str, str], kept: dict[str, str]) -> dict[str, Any]:
    text = "" if copy["text"] == kept["text"] else f", which begins: {' '.join(kept['text'].split())}"
    return {**copy, "detail": f"kept: {kept['where']}{text}"}


def _to_json(tallies: Tallies) -> dict[str, Any]:
    return {reason: vars(tally) for reason, tally in tallies.items()}
