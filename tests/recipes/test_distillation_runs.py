"""Runs of `recipes/distill.py`: one that is killed, a teacher in a Hugging Face folder, and `titanlike verify`."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, SMALL, python, run, start, wait_for
from tests.programs import verify

DEBUG = str(ROOT / "train_configs/distill_debug.toml")
TEACHER = {key.replace("model.", "teacher."): value for key, value in SMALL.items() if key.startswith("model.")}
STUDENT = {"model.dim": "32", "model.num_layers": "1"}
TINY = SMALL | TEACHER | STUDENT | {"training.steps": "16", "checkpoint.interval": "4", "validation.interval": "8"}


def records(folder: Path) -> list[dict[str, Any]]:
    """Returns what is no measurement of time or memory."""
    names = ("step", "loss", "grad_norm", "kl", "cross_entropy", "validation_loss", "validation_kl")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [{name: line[name] for name in names if name in line} for line in lines]
    return [each for each in found if len(each) > 1]


def test_a_teacher_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, DEBUG)
    assert done.returncode == 2
    assert (
        "distillation.teacher = 'runs/teacher' is not a folder; give a run, a checkpoint or a Hugging Face folder"
        in done.stderr
    )


def test_the_figures_of_the_page_are_those_of_the_benchmark() -> None:
    report = json.loads((ROOT / "benchmarks/results/distillation_cpu.json").read_text())
    page = (ROOT / "docs/distillation.md").read_text()
    rows = (("alone", "400", "alone"), ("alone", "200", "alone, half"), ("distilled", "200", "distilled, half"))
    for kind, steps, median in rows:
        seeds = ", ".join(f"{row[kind][steps]:.3f}" for row in report["seeds"])
        assert f"| {steps} | {report['median'][median]:.3f} | {seeds} |" in page
    ratios = ", ".join(f"{row['time_ratio']:.2f}" for row in report["seeds"])
    assert f"pass, take {ratios} of the time" in page


@pytest.mark.slow
def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    """Its teacher is a run, and that of the undisturbed one is the same run as a Hugging Face folder."""
    teacher = run(tmp_path, **SMALL | {"run.name": "teacher"})
    assert teacher.returncode == 0, teacher.stderr
    folder = python(tmp_path, "-m", "titanlike.tools.cli.main", "export", "runs/teacher", "hf_teacher")
    assert folder.returncode == 0, folder.stderr
    whole = run(tmp_path, DEBUG, **TINY | {"run.name": "whole", "distillation.teacher": "hf_teacher"})
    assert whole.returncode == 0, whole.stderr
    assert re.search(
        r"\nteacher llama of 2 layers, model\.dim 64: hf_teacher\nloss +0\.8 x KL\(teacher \|\| model\)", whole.stdout
    )
    killed = start(tmp_path, None, DEBUG, **TINY | {"run.name": "killed"})
    wait_for(tmp_path / "runs/killed/checkpoints/step-00000008")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    resumed = run(tmp_path, DEBUG, **TINY | {"run.name": "killed"})
    assert resumed.returncode == 0 and "resumed at step" in resumed.stdout, resumed.stderr
    assert records(tmp_path / "runs/killed") == records(tmp_path / "runs/whole")
    exported = python(tmp_path, "-m", "titanlike.tools.cli.main", "export", "runs/killed", "hf")
    assert exported.returncode == 0, exported.stderr
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 1)


@pytest.mark.slow
def test_a_layout_of_the_shipped_recipe_is_verified(tmp_path: Path) -> None:
    recipe = str(ROOT / "train_configs/distill_llama3_1b.toml")
    done = verify(tmp_path, recipe, "--layout", "tensor=2,shard=2", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nequal within tolerance\n")
    assert re.search(r"teacher\.dim +4096 -> 64\n", done.stdout)
