"""The study: four jobs, one after another, and a picture of what they measured."""

import functools
import json
from pathlib import Path

import pytest
import study
import monitor

from tests.cloud.aws import ACCOUNT, BUCKET, Aws, leaves
from tests.cloud.test_simulated_jobs import TINY

SPEEDS = {"baseline": 6000.0, "compile": 6600.0, "float8": 8100.0, "float8_all_gather": 8400.0}


@pytest.fixture(autouse=True)
def _same_clients(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client takes a fifth of a second to make."""
    for place in ("service.make_clients", "study.make_clients"):
        monkeypatch.setattr(place, lambda region="": aws.clients)


def lay(aws: Aws, variant: str, speed: float, steps: int = 500) -> None:
    """What a run of 32 processes has left in S3; its last line was cut short."""
    lines = [
        {"step": n, "loss": 12.0 - n / 100, "tokens_per_second": 32 * speed * (n > 10)}
        for n in range(10, steps + 1, 10)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": steps, "validation_loss": 3.0}]) + '{"step": 5'
    for name, content in (("metrics.jsonl", text), ("environment.json", '{"processes": 32}')):
        aws.clients.s3.put_object(Bucket=BUCKET, Key=f"titanlike/runs/study-{variant}/{name}", Body=content.encode())


def test_figures_lie_beside_the_published_ones(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for variant, speed in SPEEDS.items():
        lay(aws, variant, speed)
    role, channels = (
        f"--role=arn:aws:iam::{ACCOUNT}:role/job",
        ["--channel=data.path=s3://t/c", "--channel=tokenizer.encoding=s3://t/t.model"],
    )
    assert (
        leaves(monkeypatch, study.main, f"--out={tmp_path}", f"--bucket={BUCKET}", role, *channels) == 0
    )  # all are done: none is sent
    said = capsys.readouterr().out
    assert "| baseline | 6,000 | +0.0% | 6,475 | +0.0% |\n| compile | 6,600 | +10.0% | 7,166 | +10.7% |" in said
    assert "| float8_all_gather | 8,400 | +40.0% | 8,950 | +38.2% |" in said
    found = json.loads((tmp_path / "study.json").read_text())["variants"]
    assert found["float8"]["tokens_per_second_per_gpu"] == 8100.0 and len(found["float8"]["losses"]) == 50
    assert (tmp_path / "study.png").stat().st_size > 10_000
    assert aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"] == []


def test_what_is_not_done_is_sent(aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("monitor.wait", functools.partial(monitor.wait, interval=0.05))
    lay(aws, "baseline", 6000.0)
    lay(aws, "compile", 6600.0, steps=400)
    words = [
        f"--role=arn:aws:iam::{ACCOUNT}:role/job",
        f"--bucket={BUCKET}",
        "--channel=data.path=s3://t/c",
        "--num_instances=4",
    ]
    assert (
        leaves(monkeypatch, study.main, f"--out={tmp_path}", *words, "--channel=tokenizer.encoding=s3://t/t.model") == 0
    )
    sent = [one["TrainingJobName"] for one in aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"]]
    assert sorted(name[:-16] for name in sent) == [
        f"titanlike-study-{name}" for name in ("compile", "float8", "float8-all-gather")
    ]
    assert set(json.loads((tmp_path / "study.json").read_text())["variants"]) == {"baseline", "compile"}


@pytest.mark.slow
def test_two_of_its_jobs_on_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = TINY | {
        "training.steps": 4, "compile.backend": "aot_eager", "tokenizer.encoding": "bytes",
        "model.vocab_size": 320, "training.compute_dtype": "float32", "model.max_seq_len": 64,
        "activation_checkpoint.mode": "none", "model.tied_head": "false",
    }  # fmt: skip
    words = [
        "--only",
        "baseline",
        "compile",  # float8 on a CPU wants keys that the others refuse
        f"--out={tmp_path}/out",
        "--simulate",
        f"--folder={tmp_path}/sim",
        *(f"--{k}={v}" for k, v in keys.items()),
    ]
    assert leaves(monkeypatch, study.main, *words) == 0
    found = json.loads((tmp_path / "out/study.json").read_text())["variants"]
    assert found["baseline"]["losses"] == pytest.approx(found["compile"]["losses"], rel=1e-5)
    assert [one["steps"] for one in found.values()] == [[1, 2, 3, 4]] * 2
    jobs = len(list((tmp_path / "sim/jobs").iterdir()))
    assert leaves(monkeypatch, study.main, *words) == 0
    assert len(list((tmp_path / "sim/jobs").iterdir())) == jobs == 2
