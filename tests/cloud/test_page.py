"""What docs/sagemaker.md says: its commands are right ones, and its policies allow what is done, and no more than the prefix."""

import fnmatch
import json
import re
import shlex
from typing import Any

import jobs
import launch
import pytest
from options import build_parser
from request import Channel, Job, request_for

from tests.cloud.aws import Aws
from tests.cloud.test_request import JOB
from tests.launching import ROOT
from titanlike.run.start import Arguments

PAGE = (ROOT / "docs/sagemaker.md").read_text()
POLICIES: list[dict[str, Any]] = [
    json.loads(text) for text in re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
]
IMPLIED = {"HeadBucket": "s3:ListBucket"}


def statements(policy: dict[str, Any], action: str) -> list[str]:
    """The resources on which a policy allows something."""
    found = []
    for one in policy["Statement"]:
        actions, resources = ([x] if isinstance(x, str) else x for x in (one["Action"], one["Resource"]))
        found += resources if action in actions else []
    return found


def allowed(policy: dict[str, Any], action: str, address: str) -> bool:
    return any(fnmatch.fnmatch(address, pattern) for pattern in statements(policy, action))


def test_commands() -> None:
    lines = (
        "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)).replace("\\\n", " ").splitlines()
    )
    ours = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("python sagemaker/")]
    assert len(ours) >= 11
    for program, *words in ours:
        if words[0] in launch.COMMANDS:
            jobs.build_parser().parse_args(words)
        else:
            recipe = [] if program == "sagemaker/launch.py" else ["train_configs/debug.toml"]
            options, rest = build_parser().parse_known_args([*recipe, *words])
            assert (ROOT / options.recipe).exists() and not Arguments(rest).overrides
            launch._channels(options.channel)


def test_a_user_may_do_what_the_commands_do(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation that is asked of the service, and each key of S3."""
    you, _ = POLICIES
    for name in ("CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"):
        assert allowed(
            you, f"sagemaker:{name}", "arn:aws:sagemaker:REGION:ACCOUNT:training-job/titanlike-debug-20261122-101112"
        )
        assert not allowed(you, f"sagemaker:{name}", "arn:aws:sagemaker:REGION:ACCOUNT:training-job/theirs")
    monkeypatch.setattr("jobs.make_clients", lambda region: aws.clients)
    job = aws.running()
    aws.say(job, "algo-1", "hello")
    aws.asked.clear()
    for words in (["list"], ["describe", job], ["logs", job], ["stop", job]):
        assert jobs.run([*words, "--region", "us-east-1"]) == 0
    asked = {operation for operation, _ in aws.asked}
    assert {"ListTrainingJobs", "DescribeTrainingJob"} <= asked
    for operation in asked:
        kind = "logs" if operation in ("DescribeLogStreams", "GetLogEvents") else "sagemaker"
        assert statements(you, f"{kind}:{operation}"), operation
    for action, key in (
        ("PutObject", "code/a/b"),
        ("GetObject", "code/a/request.json"),
        ("GetObject", "runs/a/metrics.jsonl"),
    ):
        assert allowed(you, f"s3:{action}", f"arn:aws:s3:::BUCKET/titanlike/{key}")
    assert not allowed(you, "s3:PutObject", "arn:aws:s3:::BUCKET/titanlike/checkpoints/a")


def test_a_job_may_read_and_write_its_own_places_alone() -> None:
    _, role = POLICIES
    job = Job(**{**vars(JOB), "bucket": "BUCKET", "channels": (Channel("data.path", "s3://BUCKET/tokens/c4"),)})
    request = request_for(job)
    channels = [one["DataSource"]["S3DataSource"]["S3Uri"] for one in request["InputDataConfig"]]
    assert len(channels) == 2
    for address in channels:
        assert allowed(role, "s3:GetObject", address.replace("s3://", "arn:aws:s3:::") + "file")
    words = dict(word.split("=", 1) for word in request["AlgorithmSpecification"]["ContainerArguments"] if "=" in word)
    written = [
        f"{words['--checkpoint.dir']}/{job.run}/step-00000001/manifest.json",
        f"{request['CheckpointConfig']['S3Uri']}metrics.jsonl",
        f"{request['OutputDataConfig']['S3OutputPath']}/{job.name}/output.tar.gz",
    ]
    for address in written:
        assert allowed(role, "s3:PutObject", address.replace("s3://", "arn:aws:s3:::")), address
    for place in ("titanlike/code/a", "tokens/a", "theirs/a"):
        assert not allowed(role, "s3:PutObject", f"arn:aws:s3:::BUCKET/{place}")
        assert not allowed(role, "s3:DeleteObject", f"arn:aws:s3:::BUCKET/{place}")
    assert not allowed(role, "s3:GetObject", "arn:aws:s3:::BUCKET/theirs/a")
