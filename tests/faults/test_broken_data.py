"""Broken data, before or during a run, on one rank: the error names the position, and no rank hangs."""

import json
from pathlib import Path

from tests.faults.starting import Starter

# Four readers, two for each rank. Each file is read again after a few steps.
STREAM = {
    "data.source": "stream",
    "validation.interval": "0",
    "validation.batches": "8",
    "checkpoint.interval": "0",
    "training.steps": "30",
}


def lines(number: int, count: int = 12) -> str:
    return "".join(json.dumps({"text": f"{number}.{line} says so"}) + "\n" for line in range(count))


def corpus(folder: Path) -> Path:
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.jsonl").write_text(lines(number))
    return folder


def test_bad_line_on_one_rank_ends_the_run(starter: Starter, tmp_path: Path) -> None:
    folder = corpus(tmp_path / "corpus")
    with (folder / "3.jsonl").open("a") as file:
        file.write('{"text": "cut o')
    job = starter.start(tmp_path, **STREAM | {"data.path": str(folder)})
    codes = job.wait_for_a_death(30)
    assert codes[1] == 2
    assert f"error: {folder}/3.jsonl, line 13: not JSON" in job.output
    job = starter.start(tmp_path, **STREAM | {"data.path": str(folder), "data.bad_records": "skip"})
    assert job.wait() == [0, 0]
    assert job.output.count("warning: skipped ") == 1
