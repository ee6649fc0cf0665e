"""Runs of `recipes/dpo.py`: the debug recipe learns what the page says."""

import json
from pathlib import Path

import pytest

from tests.launching import ROOT, run

DEBUG = str(ROOT / "train_configs/dpo_debug.toml")


@pytest.mark.every
@pytest.mark.minutes
def test_the_debug_recipe_learns_to_prefer_the_right_sums(tmp_path: Path) -> None:
    done = run(tmp_path, DEBUG, **{"run.name": "run", "metrics.interval": "1", "metrics.trackers": "[]"})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "rewards/accuracies" in line)
    assert first["rewards/accuracies"] == 0.5 and first["rewards/margins"] == first["kl"] == 0.0
    accuracies = [line["validation_accuracy"] for line in lines if "validation_accuracy" in line]
    assert accuracies[0] < 0.75 and accuracies[-1] > 0.9
    assert f"titanlike generate {Path('runs/run')} --chat" in done.stdout
