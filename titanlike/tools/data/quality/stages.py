"""What a worker process does with a work unit in each pass, and what happens between the passes."""

import json
from collections.abc import Iterable, Sequence

import numpy as np

from titanlike.data.tokens.tokenization import ReportProgress, WorkUnit, WorkUnitResult, tokenize
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.tools.data.quality import duplicates, lines
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.report import (
    CODES,
    Example,
    QualityReport,
    Tally,
    TallyTotals,
    tallies_from_json,
    tallies_to_json,
)
from titanlike.tools.data.quality.runs import is_complete, merge, write_run
from titanlike.tools.data.quality.tokenizing import CHANGED, CLEANED, KEPT, READ, KeptDocuments
from titanlike.utils.atomic_write import atomic_write_text

COPIES, TALLIES = "copies-{:05d}", "tallies-{:05d}.json"


def process(unit: WorkUnit, job: WorkerOptions, tokenizer: Tokenizer, report: ReportProgress) -> WorkUnitResult | None:
    """Does the pass `job.stage` over a work unit. Returns the result of tokenization; the other passes write files only."""
    if job.stage == "duplicates":
        duplicates.find_keys(unit, job, report)
        return None
    merged = duplicates.read_merged(job.stages)
    verdicts = duplicates.read_verdicts(job.stages, merged, unit.number) if merged else None
    if job.stage == "lines":
        lines.count_lines(unit, job, verdicts, report)
        return None
    if not job.quality.reads_documents:
        result = tokenize(unit, job, tokenizer, report)
    else:
        repeated = lines.read_repeated(job.stages) if job.quality.repeated_lines else None
        wanted = {place[1] for place in _places(merged) if place[0] == unit.number}
        documents = KeptDocuments(unit.number, job, verdicts, repeated, wanted)
        result = tokenize(unit, job, tokenizer, report, documents)
        found = {"tallies": tallies_to_json(documents.tallies), "excerpts": documents.excerpts}
        atomic_write_text(job.stages / TALLIES.format(unit.number), json.dumps(found))
    keys = np.unique(np.frombuffer(result.hashes, np.uint64) if result.hashes else np.empty(0, np.uint64))
    write_run(job.stages / COPIES.format(unit.number), keys, np.zeros(len(keys), np.uint32))
    result.hashes = None  # the results of all work units are in memory together
    return result


def is_finished(unit: int, job: WorkerOptions) -> bool:
    """Whether an earlier start wrote what the pass `job.stage` writes for a work unit, besides the result of tokenization."""
    if job.stage == "duplicates":
        return duplicates.read_result(job.stages, unit) is not None
    if job.stage == "lines":
        return lines.is_counted(job.stages, unit)
    tallied = not job.quality.reads_documents or (job.stages / TALLIES.format(unit)).exists()
    return tallied and is_complete(job.stages / COPIES.format(unit))


def finish_stage(units: Sequence[WorkUnit], job: WorkerOptions) -> None:
    """Joins what the work units of a pass wrote, for the next one."""
    if job.stage == "duplicates":
        duplicates.merge_keys(job, len(units))
    elif job.stage == "lines":
        lines.merge_lines(job, range(len(units)))


def build_report(results: Sequence[WorkUnitResult], job: WorkerOptions) -> QualityReport:
    """Returns the report, when all passes are finished."""
    units = [result.unit for result in results]
    tallies, excerpts = TallyTotals(), dict[tuple[int, int], dict[str, str]]()
    for unit in units if job.quality.reads_documents else []:
        found = json.loads((job.stages / TALLIES.format(unit)).read_text())
        tallies.add(tallies_from_json(found["tallies"]))
        excerpts |= {(unit, int(position)): excerpt for position, excerpt in found["excerpts"].items()}
    num_documents = sum(shard.documents for result in results for shard in result.splits.values())
    counted = Tally(num_documents, sum(result.text_bytes for result in results))
    documents = {kind: tallies.pop(kind) for kind in (READ, KEPT, CHANGED, CLEANED) if kind in tallies}
    for kind in (READ, KEPT):
        documents.setdefault(kind, Tally() if job.quality.reads_documents else counted)
    merged = duplicates.read_merged(job.stages)
    if merged is None:
        parts = merge([job.stages / COPIES.format(unit) for unit in units])
        copies = num_documents - sum(len(np.unique(part.keys)) for part in parts)
        return QualityReport(job.quality.parameters(), documents, tallies, {"exact": copies})
    for unit in units:
        before = duplicates.read_result(job.stages, unit)
        tallies.add(tallies_from_json(before["tallies"]) if before else {})
    for reason, pairs in merged.examples.items():
        if reason in tallies:
            examples = [[excerpts[unit, position] for unit, position in pair] for pair in pairs]
            tallies[reason].examples = [_example(order, *pair) for order, pair in enumerate(examples)]
    counts = {"exact": merged.exact} | ({"near": merged.near} if job.quality.finds_near_duplicates else {})
    in_order = dict(sorted(tallies.items(), key=lambda item: CODES[item[0]]))
    return QualityReport(job.quality.parameters(), documents, in_order, counts)


def _example(order: int, copy: dict[str, str], kept: dict[str, str]) -> Example:
    same = copy["text"] == kept["text"]
    text = "" if same else f", which begins: {' '.join(kept['text'].split())}"
    return Example(order, copy["where"], copy["text"], f"kept: {kept['where']}{text}")


def _places(merged: duplicates.Merged | None) -> Iterable[list[int]]:
    return (place for pairs in merged.examples.values() for pair in pairs for place in pair) if merged else ()
