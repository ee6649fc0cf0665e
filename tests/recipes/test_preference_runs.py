"""Runs of `recipes/dpo.py`: the debug recipe learns what the page says, and a run that is killed ends like an undisturbed one."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, SMALL, python, run, start, wait_for

DEBUG = str(ROOT / "train_configs/dpo_debug.toml")
TINY = SMALL | {
    "data.source": "synthetic_preference", "training.seq_len": "128", "training.steps": "16", "checkpoint.interval": "4",
    "validation.interval": "8",
}  # fmt: skip


def records(folder: Path) -> list[dict[str, Any]]:
    """Returns what is no measurement of time or memory."""
    names = ("step", "loss", "grad_norm", "kl", "rewards/margins", "validation_loss", "validation_accuracy")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [{name: line[name] for name in names if name in line} for line in lines]
    return [each for each in found if len(each) > 1]


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


@pytest.mark.slow
def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    whole = run(tmp_path, DEBUG, **TINY | {"run.name": "whole"})
    assert whole.returncode == 0, whole.stderr
    killed = start(tmp_path, None, DEBUG, **TINY | {"run.name": "killed"})
    wait_for(tmp_path / "runs/killed/checkpoints/step-00000008")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    resumed = run(tmp_path, DEBUG, **TINY | {"run.name": "killed"})
    assert resumed.returncode == 0 and "resumed at step" in resumed.stdout, resumed.stderr
    assert records(tmp_path / "runs/killed") == records(tmp_path / "runs/whole")
    exported = python(tmp_path, "-m", "titanlike.tools.cli.main", "export", "runs/killed", "hf")
    assert exported.returncode == 0, exported.stderr
    assert "generation" in (tmp_path / "hf/chat_template.jinja").read_text()
