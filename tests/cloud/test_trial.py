"""Trials of a sweep as SageMaker jobs: submission, attaching to a job, metrics, and stopping."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.aws import ACCOUNT, BUCKET, FEW_FILES, Aws, in_sequence, no_change
from tests.cloud.settings import TINY
from tests.launching import ROOT, Cli, nested, records
from titanlike.config import UserError
from titanlike.tools.clusters.sagemaker import bundle, trial
from titanlike.tools.clusters.sagemaker.service import TransientError
from titanlike.tools.sweep.results import read_results

RECIPE = str(ROOT / "train_configs/debug.toml")
ARGUMENTS = ("recipe.toml", "--optimizer.lr=0.02")  # of the job
OPTIONS = [f"--role=arn:aws:iam::{ACCOUNT}:role/job", f"--bucket={BUCKET}", "--nodes=1"]


@pytest.fixture(autouse=True)
def _environment(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("service", "trial"):
        monkeypatch.setattr(f"titanlike.tools.clusters.sagemaker.{name}.make_clients", lambda region="": aws.clients)
    monkeypatch.setattr(bundle, "LIBRARY", FEW_FILES)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def put_metrics(aws: Aws, run: str) -> None:
    lines = [{"step": step, "validation_loss": 5.0 - step / 100} for step in (20, 40)]
    files = {"metrics.jsonl": "".join(f"{json.dumps(line)}\n" for line in lines), "environment.json": "{}"}
    for name, content in files.items():
        aws.clients.s3.put_object(Bucket=BUCKET, Key=f"titanlike/runs/{run}/{name}", Body=content.encode())


def run_trial(folder: Path, *options: str) -> int:
    words = [RECIPE, f"--run.dir={folder}", "--run.name=lr-003", "--optimizer.lr=0.02", *OPTIONS, *options]
    return trial.run(words, interval=0.01)


def submitted(aws: Aws) -> list[str]:
    return [one["TrainingJobName"] for one in aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"]]


def test_a_trial_is_submitted_and_its_metrics_are_copied(aws: Aws, tmp_path: Path) -> None:
    put_metrics(aws, "lr-003")
    assert run_trial(tmp_path) == 0
    (job,) = submitted(aws)
    assert job.startswith("titanlike-lr-003-")
    request = aws.clients.sagemaker.describe_training_job(TrainingJobName=job)
    assert "--optimizer.lr=0.02" in request["AlgorithmSpecification"]["ContainerArguments"]
    assert [record["step"] for record in records(tmp_path / "lr-003")] == [20, 40]
    assert run_trial(tmp_path) == 0  # complete: not submitted again
    assert len(submitted(aws)) == 1


def test_a_trial_attaches_to_its_job_and_reports_its_failure(
    aws: Aws, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = aws.running("lr-003", arguments=ARGUMENTS)
    fail = aws.ending(job, "Failed", failure_reason="error: out of memory")
    aws.before("DescribeTrainingJob", in_sequence(*[no_change] * 3, fail))
    assert run_trial(tmp_path) == 1
    assert submitted(aws) == [job]
    assert "out of memory" in capsys.readouterr().err


def test_a_job_with_other_values_is_refused(aws: Aws, tmp_path: Path) -> None:
    job = aws.running("lr-003", arguments=("recipe.toml", "--optimizer.lr=0.03"))
    with pytest.raises(
        UserError, match=f"{job} is a job of this run with other values than --optimizer.lr=0.02; choose"
    ):
        run_trial(tmp_path)
    assert submitted(aws) == [job]


@pytest.mark.parametrize(
    ("function", "patience", "signalled"),
    [("newest_job", "PATIENCE", False), ("describe", "STOP_PATIENCE", True), ("fetch", "PATIENCE", False)],
)
def test_a_trial_ends_if_aws_does_not_answer(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, patience: str, signalled: bool
) -> None:
    """After `PATIENCE`, or earlier after a signal."""
    job, calls = aws.running("lr-003", arguments=ARGUMENTS), list[None]()

    def unavailable(*_: Any) -> Any:
        calls.append(None)
        assert len(calls) < 500, "does not end"
        if len(calls) == 2 and signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        raise TransientError("no response from AWS")

    monkeypatch.setattr(trial, patience, 0.05)
    monkeypatch.setattr(trial, function, unavailable)
    with pytest.raises(UserError, match=r"^no response from AWS; a job of run lr-003 that has started continues$"):
        run_trial(tmp_path)
    assert submitted(aws) == [job]


def test_a_signal_stops_the_job(aws: Aws, tmp_path: Path) -> None:
    job = aws.running("lr-003", arguments=ARGUMENTS)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    aws.before("DescribeTrainingJob", in_sequence(no_change, interrupt))
    aws.before("StopTrainingJob", lambda: aws.before("DescribeTrainingJob", aws.ending(job, "Stopped")))
    assert run_trial(tmp_path) == 143
    assert [operation for operation, _ in aws.calls].count("StopTrainingJob") == 1


@pytest.mark.slow
def test_a_sweep_of_simulated_jobs(cli: Cli, tmp_path: Path) -> None:
    keys = TINY | {"training.steps": 4, "validation.interval": 2, "checkpoint.interval": 4}
    lines = [f'extends = "{RECIPE}"']
    for table, values in nested(keys).items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    (tmp_path / "recipe.toml").write_text("\n".join(lines) + "\n")
    file = tmp_path / "cloud.toml"
    file.write_text(
        f'recipe = "recipe.toml"\ndir = "{tmp_path}/runs"\ntrials = 2\n[resources]\nbackend = "sagemaker"\n'
        f'options = ["--simulate", "--folder={tmp_path}/sim"]\n'
        '[search."optimizer.lr"]\nlow = 1e-3\nhigh = 1e-1\nlog = true\n'
    )
    cli("sweep", file)
    trials = read_results(tmp_path / "runs/cloud")["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 2
    assert [list(trial["values"]) for trial in trials] == [["2", "4"]] * 2
    assert len({trial["value"] for trial in trials}) == 2
    jobs = sorted(path.name[:19] for path in (tmp_path / "sim/jobs").iterdir())
    assert jobs == [f"titanlike-cloud-00{number}" for number in range(2)]
    cli("sweep", file)  # complete
    assert len(list((tmp_path / "sim/jobs").iterdir())) == 2
