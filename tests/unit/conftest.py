"""Text to be made into token shards."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.preparing import words
from titanlike.data.prepare import work_units


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """All kinds of files: lines to be cut, row groups, a compressed file, small texts, an empty one."""
    chance, folder = random.Random(0), tmp_path / "corpus"
    folder.mkdir()
    records = [{"text": words(chance, 40) if number % 50 else "", "ask": words(chance, 3)} for number in range(1200)]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records[:300]), folder / "b.parquet", row_group_size=20)
    for number in range(20):
        (folder / f"c{number:02}.txt").write_text(words(chance, 100) if number else "")
    return folder


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_units, "SMALLEST", 10_000)
