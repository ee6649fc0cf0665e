"""Broken data, before or during a run, on one rank: the error names the position, and no rank hangs."""

import json
import time
from pathlib import Path

import pytest

from tests.faults.starting import Starter
from tests.launching import losses
from tests.web import Web, web
from titanlike.config.sections import Tokenizer
from titanlike.tools.data.prepare import prepare

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


def served(site: Web) -> dict[str, str]:
    site.files = {f"{number}.jsonl": lines(number).encode() for number in range(4)}
    return STREAM | {"data.path": f"{site.address}/{{0..3}}.jsonl"}


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


@pytest.mark.slow
def test_remote_file_that_vanishes_ends_the_run(starter: Starter, tmp_path: Path) -> None:
    with web() as site:
        job = starter.start(tmp_path, **served(site) | {"training.steps": "100000"})
        metrics = tmp_path / "runs/run/metrics.jsonl"
        job.wait_for(metrics)
        while metrics.read_text().count("\n") < 10:
            time.sleep(0.01)
        del site.files["3.jsonl"]
        codes = job.wait_for_a_death(30)
        assert codes[1] == 2
        assert f"error: {site.address}/3.jsonl" in job.output
        assert "no longer exists" in job.output or "tried 3 times: ClientResponseError: 404" in job.output


@pytest.mark.slow
def test_transient_server_errors_do_not_change_the_losses(starter: Starter, tmp_path: Path) -> None:
    folder = corpus(tmp_path / "corpus")
    job = starter.start(tmp_path, **STREAM | {"data.path": str(folder), "run.name": "local"})
    assert job.wait() == [0, 0], job.output
    with web() as site:
        options = served(site)
        site.failures = 2
        job = starter.start(tmp_path, **options)
        assert job.wait() == [0, 0], job.output
        assert not site.failures
    assert losses(tmp_path / "runs/run") == losses(tmp_path / "runs/local")


def test_damaged_shards_are_refused_by_all_ranks(starter: Starter, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    prepare([str(corpus(tmp_path / "corpus"))], tokens, Tokenizer(), workers=0)
    with (tokens / "train-00000.tokens").open("r+b") as file:
        file.truncate(100)
    job = starter.start(tmp_path, **{"data.source": "shards", "data.path": str(tokens)})
    assert job.wait(30) == [2, 2]
    assert "tokens/train-00000.tokens is truncated: it has 100 bytes, but the manifest says " in job.output
    assert not (tmp_path / "runs").exists()
