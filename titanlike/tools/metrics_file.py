"""Reads the records of a run's `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any

DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and Infinity, which other writers have


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics file; none if it does not exist yet. Damaged lines, and a last line that is still being
    written, are left out."""
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the records of a metrics file, and the numbers of its damaged lines."""
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    records = [_parse(line) for line in [*lines, last]]
    damaged = [number for number, line in enumerate(lines, 1) if records[number - 1] is None and line.strip()]
    return [record for record in records if record is not None], damaged


def _parse(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line, or None if the line is damaged. Values that are not finite are None."""
    try:
        record = DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
