"""A job that is really sent: to moto's server on loopback, which takes it for SageMaker's and S3's."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch
import pytest
import monitor

from tests.cloud.aws import ACCOUNT, BUCKET, Aws, leaves
from tests.launching import ROOT

WORDS = ["train_configs/debug.toml", "--num_instances=2", f"--role=arn:aws:iam::{ACCOUNT}:role/job", f"--bucket={BUCKET}"]


SENT: list[dict[str, Any]] = []  # what CreateTrainingJob was given


@pytest.fixture(autouse=True)
def listening(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hear what is sent."""
    SENT.clear()
    monkeypatch.setattr("service.make_clients", lambda region="": aws.clients)
    event, hear = "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: SENT.append(params)
    aws.clients.session.events.register(event, hear)
    yield
    aws.clients.session.events.unregister(event, hear)


def files(aws: Aws, prefix: str) -> dict[str, bytes]:
    pages = aws.clients.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    keys = [one["Key"] for page in pages for one in page.get("Contents", [])]
    return {key.removeprefix(prefix): aws.clients.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


def test_files_and_request_arrive(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leaves(monkeypatch, launch.main, *WORDS, "--training.steps=7") == 0
    (name,) = (one["TrainingJobName"] for one in aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"])
    said = capsys.readouterr().out
    assert f"sent by boto3: {name}\nto watch it: python sagemaker/launch.py wait {name} --region us-east-1\n" in said
    there = files(aws, f"titanlike/code/{name}/")
    assert f"uploaded {len(there)} files, {sum(map(len, there.values())):,} bytes" in said
    assert there["recipes/pretrain.py"] == (ROOT / "recipes/pretrain.py").read_bytes()
    assert there["sagemaker/entry.py"] == (ROOT / "sagemaker/entry.py").read_bytes()
    assert not any(file.startswith(("tests/", "docs/", "runs/")) for file in there)
    request = json.loads(there["request.json"])
    (asked,) = SENT
    assert asked == request and request["TrainingJobName"] == name
    assert "--training.steps=7" in request["AlgorithmSpecification"]["ContainerArguments"]
    described = aws.clients.sagemaker.describe_training_job(TrainingJobName=name)
    assert described["ResourceConfig"] == request["ResourceConfig"]


def test_a_run_has_one_job_at_a_time(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = aws.running("debug")
    assert leaves(monkeypatch, launch.main, *WORDS) == 2
    assert (
        f"error: the run debug is still trained by {busy}: python sagemaker/launch.py wait {busy}"
        in capsys.readouterr().err
    )
    assert SENT == []
    assert leaves(monkeypatch, launch.main, *WORDS, "--run=other") == 0


def test_waiting_for_it(aws: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("monitor.wait", functools.partial(monitor.wait, interval=0.05))
    assert leaves(monkeypatch, launch.main, *WORDS, "--wait") == 0
    assert "Completed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--bucket=nobody-has-this",), "--bucket nobody-has-this: there is no such bucket; make it (aws s3 mb s3://nobody-has-this"),
        (("--bucket=over-there",), "--bucket over-there is in eu-west-1, and the job would run in us-east-1; use one region"),
        (("--bucket=Not_A_Bucket",), "--bucket Not_A_Bucket: give the name of a bucket"),
        (("--role=me",), "--role me: give the ARN of a role"),
        (("--region=here",), "--region here: AWS's image lies in another account there"),
        (("--region=here", "--image=x"), "--region here: give a region, such as us-east-1"),
        ((f"--run={'long' * 12}",), "SageMaker takes 63 characters, and"),
        (("--data.source=shards", "--data.path=here"), "data.path = 'here' is a path of this machine, which the job does not see"),
        (("--parallelism.tensor=32",), "parallelism.tensor = 32"),
    ],
)  # fmt: skip
def test_nothing_is_uploaded_when_something_is_wrong(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    where = {"LocationConstraint": "eu-west-1"}
    aws.clients.s3.create_bucket(Bucket="over-there", CreateBucketConfiguration=where)
    assert leaves(monkeypatch, launch.main, *WORDS, *words) == 2
    assert problem in capsys.readouterr().err
    assert files(aws, "") == {} and aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"] == []


def test_the_accounts_own_bucket_is_the_default(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    aws.clients.s3.create_bucket(Bucket=f"sagemaker-us-east-1-{ACCOUNT}")
    assert leaves(monkeypatch, launch.main, *WORDS[:-1]) == 0
    (asked,) = SENT
    assert asked["OutputDataConfig"] == {"S3OutputPath": f"s3://sagemaker-us-east-1-{ACCOUNT}/titanlike/output"}


def test_a_file_of_a_tokenizer_goes_along(aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.model").write_bytes(b"IQ== 0\n")
    (tmp_path / "tokenizer_config.json").write_bytes(b"{}")
    assert leaves(monkeypatch, launch.main, *WORDS, f"--tokenizer.encoding={tmp_path}/mine.model") == 0
    (asked,) = SENT
    assert "--tokenizer.encoding=tokenizer/mine.model" in asked["AlgorithmSpecification"]["ContainerArguments"]
    assert files(aws, f"titanlike/code/{asked['TrainingJobName']}/").items() >= {
        ("tokenizer/mine.model", b"IQ== 0\n"),
        ("tokenizer/tokenizer_config.json", b"{}"),
    }
