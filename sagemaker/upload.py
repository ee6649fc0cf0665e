"""Sending a job for real: what only the account can tell is asked first, then the files go to S3, then the request."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from limits import model_problems
from parcel import Parcel
from request import Job
from senders import sender
from service import Clients

from titanlike.config import UserError


def own_bucket(asked: Clients) -> str:
    """The bucket that SageMaker itself uses by default, of this account and region."""
    account = asked.session.client("sts").get_caller_identity()["Account"]
    return f"sagemaker-{asked.region}-{account}"


def refuse_bucket(asked: Clients, bucket: str) -> None:
    """Say what is wrong with a bucket before anything is put there."""
    from botocore.exceptions import ClientError

    try:
        found = asked.s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in ("404", "NoSuchBucket"):
            raise UserError(
                f"--bucket {bucket}: there is no such bucket; make it (aws s3 mb s3://{bucket} --region {asked.region}), or name "
                "another"
            ) from None
        raise UserError(f"--bucket {bucket}: S3 refuses it to you ({code}); name a bucket of your own") from None
    region = found["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", asked.region)
    if region != asked.region:
        raise UserError(f"--bucket {bucket} is in {region}, and the job would run in {asked.region}; use one region")


def send(asked: Clients, job: Job, request: dict[str, Any], parcel: Parcel, tell: Callable[[str], None]) -> str:
    """Upload the files, and the request itself beside them for `resume`, and send it. Returns the job's name."""
    problems = model_problems(request)
    if problems:
        raise UserError("\n".join(problems))
    contents = {name: path.read_bytes() for name, path in parcel.files.items()}
    contents |= {name: text.encode() for name, text in parcel.texts.items()}
    contents["request.json"] = json.dumps(request, indent=1).encode()
    prefix = job.code.removeprefix(f"s3://{job.bucket}/")
    extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.kms_key} if job.kms_key else {}

    def put(name: str) -> None:
        asked.s3.put_object(Bucket=job.bucket, Key=f"{prefix}/{name}", Body=contents[name], **extra)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, contents))
    tell(f"uploaded {len(contents)} files, {sum(map(len, contents.values())):,} bytes, to {job.code}")
    by, send_request = sender()
    name = send_request(request, asked.session, f"{job.bucket}/{job.prefix}")
    tell(f"sent by {by}: {name}")
    return name
