"""The IAM policies of sagemaker/ allow what the code does, limited to the prefix."""

import fnmatch
import json
from typing import Any

from tests.cloud.aws import Aws
from tests.cloud.settings import JOB
from tests.launching import ROOT
from titanlike.tools.clusters.sagemaker.jobs import active_job
from titanlike.tools.clusters.sagemaker.request import Channel, TrainingJob, request_for

USER, ROLE = (json.loads((ROOT / f"sagemaker/policy_of_{name}.json").read_text()) for name in ("user", "role"))


def statements(policy: dict[str, Any], action: str) -> list[str]:
    """Returns the resources on which a policy allows an action."""
    found = []
    for one in policy["Statement"]:
        actions, resources = ([x] if isinstance(x, str) else x for x in (one["Action"], one["Resource"]))
        found += resources if action in actions else []
    return found


def allowed(policy: dict[str, Any], action: str, resource: str) -> bool:
    return any(fnmatch.fnmatch(resource, pattern) for pattern in statements(policy, action))


def test_the_user_policy_allows_the_commands(aws: Aws) -> None:
    """Covers each operation that is called, and each S3 key."""
    for name in ("CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"):
        assert allowed(
            USER, f"sagemaker:{name}", "arn:aws:sagemaker:REGION:ACCOUNT:training-job/titanlike-debug-20261122-101112"
        )
        assert not allowed(USER, f"sagemaker:{name}", "arn:aws:sagemaker:REGION:ACCOUNT:training-job/other")
    aws.running()
    active_job(aws.clients, "debug", "titanlike")
    called = {operation for operation, _ in aws.calls}
    assert {"ListTrainingJobs", "DescribeTrainingJob"} <= called
    for operation in called:
        assert statements(USER, f"sagemaker:{operation}"), operation
    for action, key in (
        ("PutObject", "code/a/b"),
        ("GetObject", "runs/a/metrics.jsonl"),
        ("GetObject", "checkpoints/a/step-00000001/manifest.json"),
    ):
        assert allowed(USER, f"s3:{action}", f"arn:aws:s3:::BUCKET/titanlike/{key}")
    assert not allowed(USER, "s3:PutObject", "arn:aws:s3:::BUCKET/titanlike/checkpoints/a")


def test_the_role_policy_allows_only_the_job_locations() -> None:
    channels = Channel("data.path", "s3://BUCKET/tokens/c4"), Channel("checkpoint.initial", "s3://BUCKET/models/llama3")
    job = TrainingJob(**{**vars(JOB), "bucket": "BUCKET", "channels": channels})
    request = request_for(job)
    uris = [one["DataSource"]["S3DataSource"]["S3Uri"] for one in request["InputDataConfig"]]
    assert len(uris) == 3
    for uri in uris:
        assert allowed(ROLE, "s3:GetObject", uri.replace("s3://", "arn:aws:s3:::") + "file")
    arguments = dict(one.split("=", 1) for one in request["AlgorithmSpecification"]["ContainerArguments"] if "=" in one)
    written = [
        f"{arguments['--checkpoint.dir']}/{job.run}/step-00000001/manifest.json",
        f"{request['CheckpointConfig']['S3Uri']}metrics.jsonl",
        f"{request['OutputDataConfig']['S3OutputPath']}/{job.name}/output.tar.gz",
    ]
    for uri in written:
        assert allowed(ROLE, "s3:PutObject", uri.replace("s3://", "arn:aws:s3:::")), uri
    for uri in uris[1:]:
        assert allowed(USER, "s3:PutObject", uri.replace("s3://", "arn:aws:s3:::") + "/file")
    for key in ("titanlike/code/a", "tokens/a", "models/a", "other/a"):
        assert not allowed(ROLE, "s3:PutObject", f"arn:aws:s3:::BUCKET/{key}")
        assert not allowed(ROLE, "s3:DeleteObject", f"arn:aws:s3:::BUCKET/{key}")
    assert not allowed(ROLE, "s3:GetObject", "arn:aws:s3:::BUCKET/other/a")


def test_the_files_for_a_role_are_policies() -> None:
    trust, vpc = (
        json.loads((ROOT / f"sagemaker/{name}.json").read_text()) for name in ("trust_of_role", "policy_of_vpc")
    )
    (statement,) = trust["Statement"]
    assert statement["Principal"] == {"Service": "sagemaker.amazonaws.com"} and statement["Action"] == "sts:AssumeRole"
    assert statements(vpc, "ec2:CreateNetworkInterfacePermission") == ["*"]
    assert all(action.startswith("ec2:") for one in vpc["Statement"] for action in one["Action"])
