"""Runs of `recipes/distill.py`: a teacher in a Hugging Face folder, and `titanlike verify`."""

import json
import re
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, losses, python, run
from tests.programs import verify

DEBUG = str(ROOT / "train_configs/distill_debug.toml")
TEACHER = {key.replace("model.", "teacher."): value for key, value in SMALL.items() if key.startswith("model.")}
STUDENT = {"model.dim": "32", "model.num_layers": "1"}
TINY = SMALL | TEACHER | STUDENT | {"training.steps": "4"}


def test_a_teacher_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, DEBUG)
    assert done.returncode == 2
    assert (
        "distillation.teacher = 'runs/teacher' is not a folder; give a run, a checkpoint or a Hugging Face folder"
        in done.stderr
    )


def test_the_figures_of_the_log_are_those_of_the_benchmark() -> None:
    report = json.loads((ROOT / "benchmarks/results/distillation_cpu.json").read_text())
    page = (ROOT / "benchmarks/LOG.md").read_text()
    rows = (("alone", "400", "alone"), ("alone", "200", "alone, half"), ("distilled", "200", "distilled, half"))
    for kind, steps, median in rows:
        seeds = ", ".join(f"{row[kind][steps]:.3f}" for row in report["seeds"])
        assert f"| {steps} | {report['median'][median]:.3f} | {seeds} |" in page
    ratios = ", ".join(f"{row['time_ratio']:.2f}" for row in report["seeds"])
    assert f"pass, take {ratios} of the time" in " ".join(page.split())


@pytest.mark.slow
def test_a_teacher_is_a_run_or_the_same_run_as_a_hugging_face_folder(tmp_path: Path) -> None:
    teacher = run(tmp_path, **SMALL | {"run.name": "teacher"})
    assert teacher.returncode == 0, teacher.stderr
    folder = python(tmp_path, "-m", "titanlike.tools.cli.main", "export", "runs/teacher", "hf_teacher")
    assert folder.returncode == 0, folder.stderr
    for name, weights in (("one", "hf_teacher"), ("other", "runs/teacher")):
        done = run(tmp_path, DEBUG, **TINY | {"run.name": name, "distillation.teacher": weights})
        assert done.returncode == 0, done.stderr
        line = rf"\nteacher llama of 2 layers, model\.dim 64: {weights}\nloss +0\.8 x KL\(teacher \|\| model\)"
        assert re.search(line, done.stdout)
    assert losses(tmp_path / "runs/one") == losses(tmp_path / "runs/other")
    exported = python(tmp_path, "-m", "titanlike.tools.cli.main", "export", "runs/one", "hf")
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
