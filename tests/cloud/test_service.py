"""Everything that can be wrong between here and AWS, each in one sentence with its remedy."""

import sys
from typing import Any

import boto3
import botocore.exceptions as raised
import pytest
from job_status import describe
from service import TransientError, clients

from tests.cloud.aws import BUCKET, Aws, refusal
from tests.launching import free_port
from titanlike.config import UserError

LOG_IN = "log in again (aws sso login, or aws configure), or set AWS_PROFILE"


def said_by_clients(region: str = "") -> str:
    with pytest.raises(UserError) as error:
        clients(region)
    return str(error.value)


def test_without_boto3(account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert said_by_clients() == 'boto3, which talks to AWS, is not installed: pip install -e ".[sagemaker]"'


def test_regions(account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_by_clients("nowhere at all") == "--region nowhere at all: give a region, such as us-east-1"
    monkeypatch.setattr(boto3.session.Session, "client", lambda *words, **named: None)
    assert clients("eu-west-1").region == "eu-west-1"
    assert clients().region == "us-east-1"
    monkeypatch.setenv("AWS_REGION", "eu-west-2")  # which boto3 does not look at, and all other tools do
    assert clients().region == "eu-west-2"
    assert clients("eu-west-1").region == "eu-west-1"
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert said_by_clients() == "--region is missing, and neither AWS_REGION nor your AWS configuration names one"


def test_credentials(account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert said_by_clients() == (
        "AWS_PROFILE: The config profile (mine) could not be found; aws configure list-profiles shows those that there are"
    )
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert said_by_clients() == (
        "your AWS credentials cannot be used: Partial credentials found in env, missing: AWS_SECRET_ACCESS_KEY; "
        + LOG_IN
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert said_by_clients() == "there are no AWS credentials here: run aws configure, or set AWS_PROFILE"


def test_nobody_there(account: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{(port := free_port())}")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between botocore's own attempts
    made = clients("eu-west-1")
    with pytest.raises(TransientError) as error:
        describe(made, "titanlike-debug")
    assert str(error.value) == (
        f'AWS does not answer (Could not connect to the endpoint URL: "http://127.0.0.1:{port}/"): look whether the network is '
        "there, and --region eu-west-1 right"
    )
    for client in (made.sagemaker, made.logs, made.s3):
        client.close()


MAY_NOT = "User: arn:aws:iam::1:user/x is not authorized to perform: sagemaker:DescribeTrainingJob"
TROUBLE = "AWS has trouble of its own just now (DescribeTrainingJob: {}): try again in a minute"
OFTEN = "AWS is asked too often just now (DescribeTrainingJob: {}): try again in a minute"
NOT_TAKEN = f"AWS does not take your credentials ({{}}: {MAY_NOT}); {LOG_IN}"


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        (
            "AccessDeniedException", 400, UserError,
            f"your credentials may not do this (DescribeTrainingJob: {MAY_NOT}): docs/sagemaker.md has the policy that they need",
        ),
        ("ExpiredTokenException", 400, UserError, NOT_TAKEN.format("ExpiredTokenException")),
        ("UnrecognizedClientException", 400, UserError, NOT_TAKEN.format("UnrecognizedClientException")),
        ("ThrottlingException", 400, TransientError, OFTEN.format("ThrottlingException")),
        ("InternalFailure", 500, TransientError, TROUBLE.format("InternalFailure")),
        ("ServiceUnavailable", 503, TransientError, TROUBLE.format("ServiceUnavailable")),
        ("ValidationException", 400, UserError, f"AWS refuses this (DescribeTrainingJob, ValidationException): {MAY_NOT}"),
    ],
)  # fmt: skip
def test_refusals(aws: Aws, code: str, status: int, kind: type[UserError], words: str) -> None:
    aws.before("DescribeTrainingJob", lambda: refusal(code, MAY_NOT.replace(" to ", "\n to "), status))
    with pytest.raises(UserError) as error:
        describe(aws.clients, "titanlike-debug")
    assert (type(error.value), str(error.value)) == (kind, words)


@pytest.mark.parametrize(
    ("problem", "kind", "words"),
    [
        (raised.NoCredentialsError(), UserError, "your AWS credentials cannot be used: Unable to locate credentials; "),
        (raised.UnauthorizedSSOTokenError(), UserError, "your AWS credentials cannot be used: The SSO session"),
        (
            raised.TokenRetrievalError(provider="sso", error_msg="old"),
            UserError,
            "your AWS credentials cannot be used: ",
        ),
        (raised.ReadTimeoutError(endpoint_url="x"), TransientError, "AWS does not answer (Read timeout on endpoint URL"),
        (raised.ConnectTimeoutError(endpoint_url="x"), TransientError, "AWS does not answer (Connect timeout on"),
        (raised.ConnectionClosedError(endpoint_url="x"), TransientError, "AWS does not answer (Connection was closed before"),
        (raised.SSLError(endpoint_url="x", error="old"), TransientError, "AWS does not answer (SSL validation failed"),
        (raised.InvalidConfigError(error_msg="so\nbad"), UserError, "so bad"),
    ],
)
def test_what_boto3_raises(aws: Aws, problem: Exception, kind: type[UserError], words: str) -> None:
    def fail() -> None:
        raise problem

    aws.before("DescribeTrainingJob", fail)
    with pytest.raises(UserError) as error:
        describe(aws.clients, "titanlike-debug")
    assert type(error.value) is kind
    assert str(error.value).startswith(words)


def test_a_missing_job_is_none_and_not_an_error(aws: Aws) -> None:
    assert describe(aws.clients, "titanlike-debug") is None
    for name in ("", "not a name", "x" * 64, "-x", "x-", "a_b"):
        assert describe(aws.clients, name) is None
    assert [name for name, _ in aws.asked].count("DescribeTrainingJob") == 1
    answers: list[Any] = ["ResourceNotFound", "ValidationException"]
    aws.before("DescribeTrainingJob", lambda: refusal(answers.pop(0), "Requested resource not found."))
    for _ in range(2):
        assert describe(aws.clients, "titanlike-debug") is None


def test_a_missing_bucket(aws: Aws) -> None:
    from service import readable_errors

    with pytest.raises(UserError, match="there is no bucket b-bucket: give another --bucket"), readable_errors("us-east-1"):
        aws.clients.s3.get_object(Bucket="b-bucket", Key="x")
    assert aws.clients.s3.list_buckets()["Buckets"][0]["Name"] == BUCKET
