"""Checkpoints on S3, written by the ranks of a job to a local server."""

from pathlib import Path

import pytest

from tests.cloud.aws import BUCKET, Aws
from tests.launching import SMALL, losses, run


@pytest.mark.slow
def test_a_run_resumes_from_s3_bit_exactly(aws: Aws, tmp_path: Path) -> None:
    options = SMALL | {
        "run.name": "r", "checkpoint.dir": f"s3://{BUCKET}/checkpoints", "checkpoint.interval": "2",
    }  # fmt: skip
    first = run(tmp_path, variables={"NPROC": "2"}, **options)
    assert (first.returncode, first.stderr) == (0, "")
    expected = losses(tmp_path / "runs/r")
    s3 = aws.clients.s3
    keys = {entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET, Prefix="checkpoints/r/")["Contents"]}
    files = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "state.json")
    assert keys == {
        "checkpoints/r/latest",
        "checkpoints/r/owner.json",
        *(f"checkpoints/r/step-0000000{step}/{file}" for step in (4, 6) for file in files),
    }

    # A truncated shard is reported, and the run resumes from the previous checkpoint, with the same results.
    key = "checkpoints/r/step-00000006/rank-00001.safetensors"
    content = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    s3.put_object(Bucket=BUCKET, Key=key, Body=content[:-8])
    again = run(tmp_path, variables={"NPROC": "2"}, **options)
    assert again.returncode == 0, again.stderr
    assert f"s3://{BUCKET}/checkpoints/r/step-00000006/rank-00001.safetensors" in again.stderr
    assert "falling back to the previous checkpoint" in again.stderr
    assert "resumed at step 4\n" in again.stdout
    assert losses(tmp_path / "runs/r") == expected and set(expected) == set(range(1, 7))
