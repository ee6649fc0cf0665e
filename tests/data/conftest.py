"""Fixtures of the tests of `titanlike data prepare`."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.preparing import random_text
from titanlike.data.tokens import work_units


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Creates files of every kind: JSON lines that are split, row groups, small text files, an empty file."""
    rng, folder = random.Random(0), tmp_path / "corpus"
    folder.mkdir()
    records = [
        {"text": random_text(rng, 40) if number % 50 else "", "ask": random_text(rng, 3)} for number in range(1200)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records[:300]), folder / "b.parquet", row_group_size=20)
    for number in range(20):
        (folder / f"c{number:02}.txt").write_text(random_text(rng, 100) if number else "")
    return folder


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_units, "MIN_SIZE", 10_000)
