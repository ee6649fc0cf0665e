"""Runs of `recipes/dpo.py`: the debug recipe learns what the page says."""

from pathlib import Path

import pytest

from tests.launching import ROOT, recorded, records, run

DEBUG = str(ROOT / "train_configs/dpo_debug.toml")


@pytest.mark.every
@pytest.mark.minutes
def test_the_debug_recipe_learns_to_prefer_the_right_sums(tmp_path: Path) -> None:
    done = run(tmp_path, DEBUG, **{"run.name": "run", "metrics.interval": "1", "metrics.trackers": "[]"})
    assert done.returncode == 0, done.stderr
    first = next(line for line in records(tmp_path / "runs/run") if "rewards/accuracies" in line)
    assert first["rewards/accuracies"] == 0.5 and first["rewards/margins"] == first["kl"] == 0.0
    accuracies = recorded(tmp_path / "runs/run", "validation_accuracy")
    assert accuracies[0] < 0.75 and accuracies[-1] > 0.9
    assert f"titanlike generate {Path('runs/run')} --chat" in done.stdout
