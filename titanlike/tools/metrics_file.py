"""Reads the records of a run's `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics file; none if it does not exist yet. Damaged lines, and a last line that is still being
    written, are left out."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [record for line in lines if (record := parse_record(line)) is not None]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line, or None if the line is damaged. Values that are not finite are None."""
    try:
        record = json.loads(line, parse_constant=lambda _: None)  # NaN and Infinity, which other writers have
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
