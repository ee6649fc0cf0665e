"""What each stage removed, with examples: `report.json` in the folder of token shards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.config.base import printable
from titanlike.data.documents.directory import DataDirectory
from titanlike.tools.data.quality.hashing import Hashes, mix

REPORT = "report.json"
FORMAT = 1
NUM_EXAMPLES = 10  # documents of each reason
EXCERPT = 200  # characters

# Reasons for which documents are removed, in the order of the stages, and what a reader calls them.
REASONS = {
    "filter": "--filter",
    "length": "length",
    "symbols": "symbols",
    "repeated_lines": "repeated lines",
    "repeated_paragraphs": "repeated paragraphs",
    "repeated_words": "repeated words",
    "exact_duplicates": "exact duplicates",
    "near_duplicates": "near duplicates",
    "boilerplate": "lines of many documents",
}
CODES = {reason: code for code, reason in enumerate(REASONS, 1)}  # 0: kept
REASON_OF = {code: reason for reason, code in CODES.items()}

Verdicts = npt.NDArray[np.uint8]  # code of the reason for which each document is removed, 0 for those that are kept


@dataclass
class Tally:
    """Documents that were removed, or changed, for one reason, and examples: `order`, `where`, `text` and `detail` of some."""

    documents: int = 0
    bytes: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Adds the documents of another tally."""
        self.documents += other.documents
        self.bytes += other.bytes
        if other.examples:
            self.examples = sorted([*self.examples, *other.examples], key=lambda each: each["order"])[:NUM_EXAMPLES]


Tallies = dict[str, Tally]


def orders_of(units: npt.ArrayLike, positions: npt.ArrayLike) -> Hashes:
    """Returns a hash of the position of each document, which draws the same examples whatever the number of workers."""
    numbers: Hashes = np.asarray(units, np.uint64) << np.uint64(32) | np.asarray(positions, np.uint64)
    return mix(numbers) >> np.uint64(1)


def read_report(path: str) -> dict[str, Any] | None:
    """Returns the report of a folder of token shards, or None if it has none, as in earlier versions."""
    try:
        report: dict[str, Any] = json.loads(DataDirectory(path).read(REPORT))
    except (OSError, UserError):
        return None
    except ValueError as error:
        raise UserError(f"{path}/{REPORT} is not JSON: {error}; prepare the data again") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise UserError(f"{path}/{REPORT} is not a report of format {FORMAT}; prepare the data again with this version")
    return report


def summarize(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields what was removed, one line for each reason."""
    found = " and ".join(f"{count:,} {kind}" for kind, count in report["duplicates"].items())
    what = "removed" if report["options"].get("duplicates", "").startswith("remove") else "kept"
    yield f"{found} copies of an earlier document, {what}"
    for name, tally, _ in _rows(report):
        yield f"{name}: {tally['documents']:,} document{'s' * (tally['documents'] != 1)}, {tally['bytes']:,} bytes"


def render_report(report: Mapping[str, Any], num_examples: int) -> Iterator[str]:
    """Yields a report as lines of text, with at most `num_examples` examples for each reason."""
    read, kept = report["documents"]["read"], report["documents"]["kept"]
    yield (
        f"report  {read['documents']:,} documents, {read['bytes']:,} bytes read; {kept['documents']:,} documents, "
        f"{kept['bytes']:,} bytes kept"
    )
    first, *rest = summarize(report)
    yield f"        {first}"
    for line, (_, _, examples) in zip(rest, _rows(report), strict=True):
        yield f"        {line}"
        for example in examples[:num_examples]:
            detail = f": {printable(example['detail'])[:EXCERPT]}" if example["detail"] else ""
            yield f"          {printable(example['where'])}{detail}"
            yield f"            {printable(' '.join(example['text'].split()))[:100]}"


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Sequence[Mapping[str, Any]]]]:
    for reason, name in REASONS.items():
        if tally := report["removed"].get(reason):
            yield f"removed by {name}", tally, tally["examples"]
    for kind, name in (("changed", "changed by --filter"), ("cleaned", "lines of many documents removed from")):
        if tally := report["documents"].get(kind):
            yield name, tally, tally["examples"]
