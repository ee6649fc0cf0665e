"""Jobs submitted to moto's server on loopback, which replaces SageMaker and S3."""

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.cloud.aws import ACCOUNT, BUCKET, FEW_FILES, Aws
from tests.launching import ROOT, Cli
from titanlike.tools.cli import main as titanlike
from titanlike.tools.clusters.sagemaker import bundle
from titanlike.tools.clusters.sagemaker.jobs import active_job, newest_job

ARGUMENTS = [
    "launch", "sagemaker", "train_configs/debug.toml", "--nodes=2", "--training.global_batch_size=16",
    f"--role=arn:aws:iam::{ACCOUNT}:role/job", f"--bucket={BUCKET}",
]  # fmt: skip


LIBRARY = bundle.LIBRARY
REQUESTS: list[dict[str, Any]] = []  # parameters of CreateTrainingJob


@pytest.fixture(autouse=True)
def recorded(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Records the submitted requests. The jobs get few files: the whole library takes a second."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bundle, "LIBRARY", FEW_FILES)
    REQUESTS.clear()
    monkeypatch.setattr("titanlike.tools.clusters.sagemaker.service.make_clients", lambda region="": aws.clients)
    event, record = "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: REQUESTS.append(params)
    aws.clients.session.events.register(event, record)
    yield
    aws.clients.session.events.unregister(event, record)


def sizes(aws: Aws, prefix: str) -> dict[str, int]:
    pages = aws.clients.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return {one["Key"].removeprefix(prefix): one["Size"] for page in pages for one in page.get("Contents", [])}


def content(aws: Aws, key: str) -> bytes:
    return cast(bytes, aws.clients.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def test_files_and_request_are_submitted(aws: Aws, monkeypatch: pytest.MonkeyPatch, program: Cli) -> None:
    monkeypatch.setattr(bundle, "LIBRARY", LIBRARY)
    out = program(titanlike.main, *ARGUMENTS, "--training.steps=70").out
    (name,) = (one["TrainingJobName"] for one in aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"])
    assert (
        f"submitted with boto3: {name}\nto wait for its end: aws sagemaker wait training-job-completed-or-stopped "
        f"--training-job-name {name}\n" in out
    )
    folder = f"titanlike/code/{name}/"
    uploaded = sizes(aws, folder)
    assert f"uploaded {len(uploaded)} files, {sum(uploaded.values()):,} bytes" in out
    for file in ("recipes/pretrain.py", "titanlike/tools/clusters/sagemaker/entry.py"):
        assert content(aws, folder + file) == (ROOT / file).read_bytes()
    assert not any(file.startswith(("tests/", "docs/", "runs/")) for file in uploaded)
    request = json.loads(content(aws, f"{folder}request.json"))
    (submitted,) = REQUESTS
    assert submitted == request and request["TrainingJobName"] == name
    assert "--training.steps=70" in request["AlgorithmSpecification"]["ContainerArguments"]
    description = aws.clients.sagemaker.describe_training_job(TrainingJobName=name)
    assert description["ResourceConfig"] == request["ResourceConfig"]


def test_a_run_has_one_job_at_a_time(aws: Aws, program: Cli) -> None:
    active = aws.running("debug")
    message = f"error: run debug has an active job, {active}; wait for its end, stop it, or choose another --run"
    assert message in program(titanlike.main, *ARGUMENTS, code=2).err
    assert REQUESTS == []
    program(titanlike.main, *ARGUMENTS, "--run=other")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--bucket=nobody-has-this",), "--bucket nobody-has-this does not exist; create it (aws s3 mb s3://nobody-has-this"),
        (("--bucket=over-there",), "--bucket over-there is in eu-west-1, but the job would run in us-east-1; use one region"),
        (("--region=here",), "--region here: the account of the AWS image is unknown"),
    ],
)  # fmt: skip
def test_nothing_is_uploaded_after_an_error(aws: Aws, program: Cli, arguments: tuple[str, ...], error: str) -> None:
    location = {"LocationConstraint": "eu-west-1"}
    aws.clients.s3.create_bucket(Bucket="over-there", CreateBucketConfiguration=location)
    assert error in program(titanlike.main, *ARGUMENTS, *arguments, code=2).err
    assert sizes(aws, "") == {} and aws.clients.sagemaker.list_training_jobs()["TrainingJobSummaries"] == []


def test_jobs_of_a_run_exclude_jobs_of_similar_names(aws: Aws) -> None:
    first, dotted, longer, later = [aws.submit(run) for run in ("a-b", "a.b", "a-b-c", "a-b")]
    aws.set_status(first, "InProgress", "Training")
    aws.set_status(longer, "InProgress", "Training")
    assert newest_job(aws.clients, "a", "titanlike") is None
    assert "DescribeTrainingJob" not in [name for name, _ in aws.calls]  # the names are enough
    found = {run: newest_job(aws.clients, run, "titanlike") for run in ("a-b", "a.b", "a-b-c", "b")}
    assert {run: job.name for run, job in found.items() if job} == {"a-b": later, "a.b": dotted, "a-b-c": longer}
    active = {run: active_job(aws.clients, run, "titanlike") for run in ("a-b", "a.b", "a-b-c")}
    assert {run: job.name for run, job in active.items() if job} == {"a-b": first, "a-b-c": longer}
    aws.set_status(first, "Stopping")
    assert (job := active_job(aws.clients, "a-b", "titanlike")) and job.name == first
    aws.set_status(first, "Stopped")
    assert active_job(aws.clients, "a-b", "titanlike") is None
    assert newest_job(aws.clients, "a-b", "other") is None


def test_default_bucket(aws: Aws, program: Cli) -> None:
    aws.clients.s3.create_bucket(Bucket=f"sagemaker-us-east-1-{ACCOUNT}")
    program(titanlike.main, *ARGUMENTS[:-1])
    (submitted,) = REQUESTS
    assert submitted["OutputDataConfig"] == {"S3OutputPath": f"s3://sagemaker-us-east-1-{ACCOUNT}/titanlike/output"}
