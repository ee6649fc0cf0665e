"""Submits a job: checks what only the account knows, uploads the files, then sends the request."""

import json
from concurrent.futures import ThreadPoolExecutor

from bundle import Bundle
from job_status import active_job, command
from request import Job, base_name, request_for
from service import Clients, NotFound, readable_errors
from submit import submit
from validation import request_errors

from titanlike.config import UserError


def upload_and_submit(clients: Clients, job: Job, bundle: Bundle, sender: str) -> str:
    """Uploads the files, with the request for `resume` beside them, and submits the request. Returns the job's name."""
    check_bucket(clients, job.bucket)
    if active := active_job(clients, job.run, base_name(job.prefix, job.run)):
        raise UserError(
            f"run {job.run} has an active job, {active.name}: {command('wait', active.name, clients.region)}; to start another "
            "run, choose another --run"
        )
    request = request_for(job)
    if errors := request_errors(request):
        raise UserError("\n".join(errors))
    contents = {**bundle.contents, "request.json": json.dumps(request, indent=1).encode()}
    prefix = job.code.removeprefix(f"s3://{job.bucket}/")
    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.kms_key} if job.kms_key else {}

    def put(name: str) -> None:
        clients.s3.put_object(Bucket=job.bucket, Key=f"{prefix}/{name}", Body=contents[name], **encryption)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, contents))
    print(f"uploaded {len(contents)} files, {sum(map(len, contents.values())):,} bytes, to {job.code}")
    with readable_errors(clients.region):
        name = submit(sender, request, clients.session, f"{job.bucket}/{job.prefix}")
    print(f"submitted with {sender}: {name}")
    return name


def check_bucket(clients: Clients, bucket: str) -> None:
    """Refuses a bucket that does not exist, is not accessible, or is in another region."""
    try:
        found = clients.s3.head_bucket(Bucket=bucket)
    except NotFound:
        make = f"aws s3 mb s3://{bucket} --region {clients.region}"
        raise UserError(f"--bucket {bucket} does not exist; create it ({make}), or choose another") from None
    except UserError as error:
        raise UserError(f"--bucket {bucket}: {error}") from None
    region = found["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", clients.region)
    if region != clients.region:
        raise UserError(f"--bucket {bucket} is in {region}, but the job would run in {clients.region}; use one region")
