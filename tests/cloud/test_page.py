"""docs/sagemaker.md: its policies allow what the code does, limited to the prefix."""

import fnmatch
import json
import re
from typing import Any

import jobs
import pytest
from request import Channel, Job, request_for

from tests.cloud.aws import Aws
from tests.cloud.settings import JOB
from tests.launching import ROOT

PAGE = (ROOT / "docs/sagemaker.md").read_text()
POLICIES: list[dict[str, Any]] = [
    json.loads(text) for text in re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
]


def statements(policy: dict[str, Any], action: str) -> list[str]:
    """Returns the resources on which a policy allows an action."""
    found = []
    for one in policy["Statement"]:
        actions, resources = ([x] if isinstance(x, str) else x for x in (one["Action"], one["Resource"]))
        found += resources if action in actions else []
    return found


def allowed(policy: dict[str, Any], action: str, resource: str) -> bool:
    return any(fnmatch.fnmatch(resource, pattern) for pattern in statements(policy, action))


def test_the_user_policy_allows_the_commands(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers each operation that is called, and each S3 key."""
    user, _ = POLICIES
    for name in ("CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"):
        assert allowed(
            user, f"sagemaker:{name}", "arn:aws:sagemaker:REGION:ACCOUNT:training-job/titanlike-debug-20261122-101112"
        )
        assert not allowed(user, f"sagemaker:{name}", "arn:aws:sagemaker:REGION:ACCOUNT:training-job/other")
    monkeypatch.setattr("jobs.make_clients", lambda region: aws.clients)
    job = aws.running()
    aws.log(job, "algo-1", "hello")
    aws.calls.clear()
    for arguments in (["list"], ["describe", job], ["logs", job], ["stop", job]):
        assert jobs.run([*arguments, "--region", "us-east-1"]) == 0
    called = {operation for operation, _ in aws.calls}
    assert {"ListTrainingJobs", "DescribeTrainingJob"} <= called
    for operation in called:
        kind = "logs" if operation in ("DescribeLogStreams", "GetLogEvents") else "sagemaker"
        assert statements(user, f"{kind}:{operation}"), operation
    for action, key in (
        ("PutObject", "code/a/b"),
        ("GetObject", "code/a/request.json"),
        ("GetObject", "runs/a/metrics.jsonl"),
    ):
        assert allowed(user, f"s3:{action}", f"arn:aws:s3:::BUCKET/titanlike/{key}")
    assert not allowed(user, "s3:PutObject", "arn:aws:s3:::BUCKET/titanlike/checkpoints/a")


def test_the_role_policy_allows_only_the_job_locations() -> None:
    _, role = POLICIES
    job = Job(**{**vars(JOB), "bucket": "BUCKET", "channels": (Channel("data.path", "s3://BUCKET/tokens/c4"),)})
    request = request_for(job)
    uris = [one["DataSource"]["S3DataSource"]["S3Uri"] for one in request["InputDataConfig"]]
    assert len(uris) == 2
    for uri in uris:
        assert allowed(role, "s3:GetObject", uri.replace("s3://", "arn:aws:s3:::") + "file")
    arguments = dict(one.split("=", 1) for one in request["AlgorithmSpecification"]["ContainerArguments"] if "=" in one)
    written = [
        f"{arguments['--checkpoint.dir']}/{job.run}/step-00000001/manifest.json",
        f"{request['CheckpointConfig']['S3Uri']}metrics.jsonl",
        f"{request['OutputDataConfig']['S3OutputPath']}/{job.name}/output.tar.gz",
    ]
    for uri in written:
        assert allowed(role, "s3:PutObject", uri.replace("s3://", "arn:aws:s3:::")), uri
    for key in ("titanlike/code/a", "tokens/a", "other/a"):
        assert not allowed(role, "s3:PutObject", f"arn:aws:s3:::BUCKET/{key}")
        assert not allowed(role, "s3:DeleteObject", f"arn:aws:s3:::BUCKET/{key}")
    assert not allowed(role, "s3:GetObject", "arn:aws:s3:::BUCKET/other/a")
