"""AWS, asked: the clients, and what goes wrong on the way in plain words.

boto3 is imported when somebody is asked, not before.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from titanlike.config import UserError

THROTTLED = {
    "RequestLimitExceeded",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "TooManyRequestsException",
}
NOT_KNOWN = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
DENIED = {"403", "AccessDenied", "AccessDeniedException", "UnauthorizedOperation"}
LOG_IN = "log in again (aws sso login, or aws configure), or set AWS_PROFILE"


class NoAnswer(UserError):
    """Nobody answered, or not now: asked again later, the same question may be."""


@dataclass(frozen=True)
class Clients:
    """Whom to ask."""

    region: str
    session: Any
    sagemaker: Any
    logs: Any
    s3: Any


def clients(region: str = "") -> Clients:
    """boto3's clients, in this region or the configured one."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise UserError('boto3, which talks to AWS, is not installed: pip install -e ".[sagemaker]"') from None
    # Its defaults let a call over a dead network stand for five minutes, and Ctrl-C wait as long.
    config = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 3})
    with plainly(region):
        session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
        if not session.region_name:
            raise UserError("--region is missing, and neither AWS_REGION nor your AWS configuration names one")
        if session.get_credentials() is None:
            raise UserError("there are no AWS credentials here: run aws configure, or set AWS_PROFILE")
        made = (session.client(name, config=config) for name in ("sagemaker", "logs", "s3"))
        return Clients(session.region_name, session, *made)


@contextmanager
def plainly(region: str) -> Iterator[None]:
    """Say what boto3 raises in one sentence, with the remedy."""
    from botocore import exceptions as raised

    try:
        yield
    except raised.ClientError as error:
        raise _refusal(error.response, error.operation_name) from None
    except raised.ProfileNotFound as error:
        raise UserError(f"AWS_PROFILE: {error}; aws configure list-profiles shows those that there are") from None
    except (
        raised.CredentialRetrievalError,
        raised.LoginError,
        raised.NoAuthTokenError,
        raised.NoCredentialsError,
        raised.PartialCredentialsError,
        raised.SSOError,
        raised.TokenRetrievalError,
    ) as error:
        raise UserError(f"your AWS credentials cannot be used: {error}; {LOG_IN}") from None
    except (raised.ConnectionError, raised.HTTPClientError, raised.IncompleteReadError) as error:
        raise NoAnswer(
            f"AWS does not answer ({_one_line(error)}): look whether the network is there, and --region {region} right"
        ) from None
    except raised.InvalidRegionError:
        raise UserError(f"--region {region}: give a region, such as us-east-1") from None
    except raised.BotoCoreError as error:
        raise UserError(_one_line(error)) from None


def _refusal(response: dict[str, Any], operation: str) -> UserError:
    """What an answer says that is an error."""
    code, message = response["Error"].get("Code", ""), _one_line(response["Error"].get("Message", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in THROTTLED:
        return NoAnswer(f"AWS is asked too often just now ({operation}: {code}): try again in a minute")
    if status >= 500:
        return NoAnswer(f"AWS has trouble of its own just now ({operation}: {code}): try again in a minute")
    if code in NOT_KNOWN:
        return UserError(f"AWS does not take your credentials ({code}: {message}); {LOG_IN}")
    if code in DENIED:
        return UserError(
            f"your credentials may not do this ({operation}: {message}): docs/sagemaker.md has the policy that they need"
        )
    if code == "NoSuchBucket":
        return UserError(f"there is no bucket {response['Error'].get('BucketName', '')}: give another --bucket")
    return UserError(f"AWS refuses this ({operation}, {code}): {message}")


def _one_line(words: object) -> str:
    return " ".join(str(words).split())


def is_missing(error: Any) -> bool:
    """Whether an answer says that there is no such thing. SageMaker has no code of its own for that."""
    found = error.response["Error"]
    return found.get("Code", "") in ("NoSuchKey", "404", "ResourceNotFound", "ResourceNotFoundException") or (
        found.get("Code") == "ValidationException"
        and re.search("not found|could not find|does not exist", found.get("Message", ""), re.IGNORECASE) is not None
    )
