"""The study: four jobs in sequence, and a plot of their results."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import bundle
import monitor
import pytest
import study

from tests.cloud.aws import ACCOUNT, BUCKET, FEW_FILES, Aws, in_sequence, no_change
from tests.launching import ROOT, Cli
from titanlike.recipe import PretrainRecipe, load

ARGUMENTS = (
    f"--role=arn:aws:iam::{ACCOUNT}:role/job", f"--bucket={BUCKET}", "--channel=data.path=s3://t/c",
    "--channel=tokenizer.encoding=s3://t/t.model",
)  # fmt: skip
SPEEDS = {"baseline": 6000.0, "compile": 6600.0, "float8": 8100.0, "float8_all_gather": 8400.0}


@pytest.fixture(autouse=True)
def _shared_clients(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares the session's clients: creating them takes 0.2 seconds."""
    study._bucket.cache_clear()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bundle, "LIBRARY", FEW_FILES)
    for name in ("service.make_clients", "study.make_clients"):
        monkeypatch.setattr(name, lambda region="": aws.clients)


def put_metrics(aws: Aws, variant: str, speed: float, steps: int = 2000) -> None:
    """Writes the metrics of a run of 32 processes to S3; the last line is truncated."""
    lines = [
        {"step": n, "loss": 12.0 - n / 100, "tokens_per_second": 32 * speed * (n > 10)}
        for n in range(10, steps + 1, 10)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": steps, "validation_loss": 3.0}]) + '{"step": 5'
    for name, content in (("metrics.jsonl", text), ("environment.json", '{"processes": 32}')):
        aws.clients.s3.put_object(Bucket=BUCKET, Key=f"titanlike/runs/study-{variant}/{name}", Body=content.encode())


def test_results_are_compared_with_the_published_ones(aws: Aws, program: Cli, tmp_path: Path) -> None:
    for variant, speed in SPEEDS.items():
        put_metrics(aws, variant, speed)
    out = program(study.main, f"--out={tmp_path}", *ARGUMENTS).out  # all variants are complete, none is submitted
    assert "| baseline | 6,000 | +0.0% | 6,475 | +0.0% |\n| compile | 6,600 | +10.0% | 7,166 | +10.7% |" in out
    assert "| float8_all_gather | 8,400 | +40.0% | 8,950 | +38.2% |" in out
    results = json.loads((tmp_path / "study.json").read_text())["variants"]
    assert results["float8"]["tokens_per_second_per_gpu"] == 8100.0 and len(results["float8"]["losses"]) == 200
    assert (tmp_path / "study.png").stat().st_size > 10_000
    assert aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"] == []


def test_the_recipes_are_those_of_the_published_study() -> None:
    """2,000 steps on 32 GPUs with a sequence of 8,192 tokens each. Each recipe adds one change to the previous one."""
    recipes = [load(PretrainRecipe, study.REPOSITORY / f"train_configs/study/{name}.toml") for name in study.PUBLISHED]
    for recipe in recipes:
        training = recipe.training
        assert (training.steps, training.global_batch_size, training.seq_len) == (2000, 32, 8192)
        assert replace(recipe, compile=recipes[0].compile, float8=recipes[0].float8) == recipes[0]
    changes = [(recipe.compile.mode, recipe.float8.scaling, recipe.float8.all_gather) for recipe in recipes]
    assert changes == [
        ("none", "none", False),
        ("block", "none", False),
        ("block", "tensorwise", False),
        ("block", "tensorwise", True),
    ]


def test_incomplete_variants_are_submitted(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, program: Cli, tmp_path: Path
) -> None:
    monkeypatch.setattr("monitor.wait", functools.partial(monitor.wait, interval=0.05))
    put_metrics(aws, "baseline", 6000.0)
    put_metrics(aws, "compile", 6600.0, steps=400)
    program(study.main, f"--out={tmp_path}", *ARGUMENTS, "--instances=4")
    submitted = [one["TrainingJobName"] for one in aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"]]
    assert sorted(name[:-16] for name in submitted) == [
        f"titanlike-study-{name}" for name in ("compile", "float8", "float8-all-gather")
    ]
    assert set(json.loads((tmp_path / "study.json").read_text())["variants"]) == {"baseline", "compile"}


def test_an_active_job_is_waited_for(aws: Aws, monkeypatch: pytest.MonkeyPatch, program: Cli, tmp_path: Path) -> None:
    """After the command was interrupted. The bucket may be that of the environment."""
    monkeypatch.setattr("monitor.wait", functools.partial(monitor.wait, interval=0.01))
    monkeypatch.setenv("SAGEMAKER_BUCKET", BUCKET)
    put_metrics(aws, "compile", 6600.0, steps=400)
    job = aws.running("study-compile")
    aws.before("DescribeTrainingJob", in_sequence(*[no_change] * 3, aws.ending(job)))
    program(study.main, f"--out={tmp_path}", "--only=compile", "--instances=4")
    assert [one["TrainingJobName"] for one in aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"]] == [
        job
    ]
    assert "compile" in json.loads((tmp_path / "study.json").read_text())["variants"]
