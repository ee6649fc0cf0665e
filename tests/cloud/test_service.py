"""Errors of AWS and boto3: each is reported in one sentence with its remedy."""

from types import SimpleNamespace
from typing import Any

import boto3
import pytest

from tests.cloud.aws import BUCKET, Aws, error_response
from titanlike.config import UserError
from titanlike.tools.clusters.sagemaker.jobs import describe
from titanlike.tools.clusters.sagemaker.service import TransientError, make_clients

LOG_IN = "log in again (aws sso login, or aws configure), or set AWS_PROFILE"


def client_error(region: str = "") -> str:
    with pytest.raises(UserError) as error:
        make_clients(region)
    return str(error.value)


def test_regions(account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_error("nowhere at all") == "--region nowhere at all: expected a region, such as us-east-1"
    monkeypatch.setattr(boto3.session.Session, "client", lambda *_, **__: SimpleNamespace(_make_api_call=None))
    assert make_clients("eu-west-1").region == "eu-west-1"
    assert make_clients().region == "us-east-1"
    monkeypatch.setenv("AWS_REGION", "eu-west-2")  # boto3 ignores it, the AWS CLI does not
    assert make_clients().region == "eu-west-2"
    assert make_clients("eu-west-1").region == "eu-west-1"
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert client_error() == "--region is missing, and neither AWS_REGION nor the AWS configuration sets one"


DENIED = "User: arn:aws:iam::1:user/x is not authorized to perform: sagemaker:DescribeTrainingJob"
INTERNAL = "AWS reports an internal error (DescribeTrainingJob: {}); try again in a minute"
THROTTLED = "AWS throttles requests (DescribeTrainingJob: {}); try again in a minute"
REJECTED = f"AWS rejects the credentials ({{}}: {DENIED}); {LOG_IN}"


@pytest.mark.parametrize(
    ("code", "status", "kind", "message"),
    [
        (
            "AccessDeniedException", 400, UserError,
            f"access denied (DescribeTrainingJob: {DENIED}); docs/sagemaker.md lists the required permissions",
        ),
        ("ExpiredTokenException", 400, UserError, REJECTED.format("ExpiredTokenException")),
        ("ThrottlingException", 400, TransientError, THROTTLED.format("ThrottlingException")),
        ("InternalFailure", 500, TransientError, INTERNAL.format("InternalFailure")),
        ("ValidationException", 400, UserError, f"AWS rejects the request (DescribeTrainingJob, ValidationException): {DENIED}"),
    ],
)  # fmt: skip
def test_service_errors(aws: Aws, code: str, status: int, kind: type[UserError], message: str) -> None:
    aws.before("DescribeTrainingJob", lambda: error_response(code, DENIED.replace(" to ", "\n to "), status))
    with pytest.raises(UserError) as error:
        describe(aws.clients, "titanlike-debug")
    assert (type(error.value), str(error.value)) == (kind, message)


def test_a_missing_job_is_none(aws: Aws) -> None:
    assert describe(aws.clients, "titanlike-debug") is None
    codes: list[Any] = ["ResourceNotFound", "ValidationException"]
    aws.before("DescribeTrainingJob", lambda: error_response(codes.pop(0), "Requested resource not found."))
    for _ in range(2):
        assert describe(aws.clients, "titanlike-debug") is None


def test_a_missing_bucket(aws: Aws) -> None:
    with pytest.raises(UserError, match="bucket b-bucket does not exist; choose another --bucket"):
        aws.clients.s3.get_object(Bucket="b-bucket", Key="x")
    assert aws.clients.s3.list_buckets()["Buckets"][0]["Name"] == BUCKET
