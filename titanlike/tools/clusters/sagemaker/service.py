"""AWS clients, whose errors are reported in one sentence with the remedy. boto3 is imported on first use."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from titanlike.config import UserError

THROTTLING = {
    "RequestLimitExceeded", "SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException",
}  # fmt: skip
INVALID_CREDENTIALS = {
    "AuthFailure", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId",
    "InvalidSignatureException", "RequestExpired", "SignatureDoesNotMatch", "UnrecognizedClientException",
}  # fmt: skip
ACCESS_DENIED = {"403", "AccessDenied", "AccessDeniedException", "UnauthorizedOperation"}
NOT_FOUND = {"404", "NoSuchKey", "ResourceNotFound", "ResourceNotFoundException"}
LOG_IN = "log in again (aws sso login, or aws configure), or set AWS_PROFILE"
NO_REGION = "--region is missing, and neither AWS_REGION nor the AWS configuration sets one"


class TransientError(UserError):
    """AWS did not respond, or not for now: a retry may succeed."""


class NotFound(UserError):
    """The requested object, job or log group does not exist."""


@dataclass(frozen=True)
class Clients:
    """The boto3 clients of one region. Their calls raise `UserError`."""

    region: str
    session: Any
    sagemaker: Any
    s3: Any

    def read_object(self, bucket: str, key: str) -> bytes:
        """Returns the content of an S3 object."""
        with readable_errors(self.region):  # reading the body may fail after the call has succeeded
            return bytes(self.s3.get_object(Bucket=bucket, Key=key)["Body"].read())

    def default_bucket(self) -> str:
        """Returns SageMaker's default bucket of this account and region."""
        with readable_errors(self.region):
            return f"sagemaker-{self.region}-{self.session.client('sts').get_caller_identity()['Account']}"


def make_clients(region: str = "") -> Clients:
    """Creates the clients for this region, or for the configured one."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise UserError('boto3 is not installed; run: pip install "titanlike[sagemaker]"') from None
    # With the default timeouts, a call without a network blocks, and defers Ctrl-C, for five minutes.
    config = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 3})
    with readable_errors(region):
        session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
        if not session.region_name:
            raise UserError(NO_REGION)
        if session.get_credentials() is None:
            raise UserError("no AWS credentials found; run aws configure, or set AWS_PROFILE")
        region = session.region_name
        made = (_with_readable_errors(session.client(name, config=config), region) for name in ("sagemaker", "s3"))
        return Clients(region, session, *made)


def _with_readable_errors(client: Any, region: str) -> Any:
    """Wraps the function that all of a client's methods, paginators and waiters call."""
    call = client._make_api_call

    def make_api_call(operation: str, parameters: dict[str, Any]) -> Any:
        with readable_errors(region):
            return call(operation, parameters)

    client._make_api_call = make_api_call
    return client


@contextmanager
def readable_errors(region: str) -> Iterator[None]:
    """Converts exceptions of boto3 to `UserError`."""
    from botocore import exceptions

    try:
        yield
    except exceptions.ClientError as error:
        raise _service_error(error.response, error.operation_name) from None
    except exceptions.ProfileNotFound as error:
        raise UserError(f"AWS_PROFILE: {error}; run aws configure list-profiles to list the profiles") from None
    except (
        exceptions.CredentialRetrievalError, exceptions.LoginError, exceptions.NoAuthTokenError, exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError, exceptions.SSOError, exceptions.TokenRetrievalError,
    ) as error:  # fmt: skip
        raise UserError(f"invalid AWS credentials: {error}; {LOG_IN}") from None
    except (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError) as error:
        raise TransientError(
            f"no response from AWS ({_one_line(error)}): check the network, and --region {region}"
        ) from None
    except exceptions.InvalidRegionError:
        raise UserError(f"--region {region}: expected a region, such as us-east-1") from None
    except exceptions.BotoCoreError as error:
        raise UserError(_one_line(error)) from None


def _service_error(response: dict[str, Any], operation: str) -> UserError:
    code, message = response["Error"].get("Code", ""), _one_line(response["Error"].get("Message", ""))
    if code in THROTTLING:
        return TransientError(f"AWS throttles requests ({operation}: {code}); try again in a minute")
    if response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
        return TransientError(f"AWS reports an internal error ({operation}: {code}); try again in a minute")
    if code in INVALID_CREDENTIALS:
        return UserError(f"AWS rejects the credentials ({code}: {message}); {LOG_IN}")
    if code in ACCESS_DENIED:
        return UserError(f"access denied ({operation}: {message}); docs/sagemaker.md lists the required permissions")
    if code == "NoSuchBucket":
        return UserError(f"bucket {response['Error'].get('BucketName', '')} does not exist; choose another --bucket")
    # SageMaker has no error code for a missing job.
    is_missing = code == "ValidationException" and re.search(
        "not found|could not find|does not exist", message, re.IGNORECASE
    )
    kind = NotFound if is_missing or code in NOT_FOUND else UserError
    return kind(f"AWS rejects the request ({operation}, {code}): {message}")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
