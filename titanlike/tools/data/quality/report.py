"""What each stage removed, with examples: `report.json` in the folder of token shards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.config.base import printable
from titanlike.data.documents.directory import DataDirectory
from titanlike.utils.atomic_write import atomic_write_text

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
class Example:
    """A removed document. `order` is a hash of its position, which draws the same sample whatever the number of workers."""

    order: int
    where: str  # file and line or row
    text: str  # its beginning
    detail: str = ""


@dataclass
class Tally:
    """Documents that were removed, or changed, for one reason."""

    documents: int = 0
    bytes: int = 0
    examples: list[Example] = field(default_factory=list)

    def wants(self, order: int) -> bool:
        """Whether a document with this order would be among the examples."""
        return len(self.examples) < NUM_EXAMPLES or order < self.examples[-1].order

    def count(self, num_bytes: int, example: Example | None = None) -> None:
        """Adds one document, which is an example if `wants` says so."""
        self.documents += 1
        self.bytes += num_bytes
        if example:
            self.examples = _smallest([*self.examples, example])

    def add(self, other: "Tally") -> None:
        """Adds the documents of another tally."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.examples = _smallest([*self.examples, *other.examples])


def _smallest(examples: list[Example]) -> list[Example]:
    return sorted(examples, key=lambda each: each.order)[:NUM_EXAMPLES]


Tallies = dict[str, Tally]


class TallyTotals(Tallies):
    """The sum of tallies."""

    def add(self, tallies: Tallies) -> None:
        """Adds the tallies of a work unit."""
        for reason, tally in tallies.items():
            self.setdefault(reason, Tally()).add(tally)


def tallies_to_json(tallies: Tallies) -> dict[str, Any]:
    """Returns tallies as values that JSON can hold."""
    return {reason: asdict(tally) for reason, tally in tallies.items()}


def tallies_from_json(values: Mapping[str, Any]) -> Tallies:
    """Returns what `tallies_to_json` made values of."""
    return {
        reason: Tally(tally["documents"], tally["bytes"], [Example(**each) for each in tally["examples"]])
        for reason, tally in values.items()
    }


@dataclass(frozen=True)
class QualityReport:
    """The content of `report.json`."""

    options: dict[str, Any]  # of the stages, those that differ from the defaults
    documents: (
        Tallies  # "read", "kept", and if there are any "changed" by the own filter and "cleaned" of repeated lines
    )
    removed: Tallies  # for each reason
    duplicates: dict[str, int]
    """Documents that are copies of an earlier one: "exact", and "near" if these were looked for."""

    def write(self, folder: Path) -> None:
        """Writes the report into a folder of token shards."""
        values: dict[str, Any] = {"format": FORMAT, "options": self.options}
        for kind, tallies in (("documents", self.documents), ("removed", self.removed)):
            values[kind] = tallies_to_json(tallies)
            for tally in values[kind].values():
                for example in tally["examples"]:
                    del example["order"]
        values["duplicates"] = self.duplicates
        atomic_write_text(folder / REPORT, json.dumps(values, indent=1) + "\n")


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
