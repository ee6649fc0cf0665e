"""`sagemaker/launch.py --dry-run`: what it tells, without credentials and without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, cpu_seconds


def dry_run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A dry run where nobody can be asked: no credentials, and a socket is an error."""
    code = (
        "import socket, sys, runpy\n"
        "def refuse(*_, **__): raise AssertionError('it opened a socket')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "sys.argv = ['launch.py', *sys.argv[1:]]\n"
        f"sys.path[0] = {str(ROOT / 'sagemaker')!r}\n"
        f"runpy.run_path({str(ROOT / 'sagemaker/launch.py')!r}, run_name='__main__')\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    nothing = {
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=kept | nothing | environ,
    )


DATA = ("--channel=data.path=s3://tokens/c4", "--channel=tokenizer.encoding=s3://tokens/llama3/tokenizer.model")
BIG = "train_configs/llama3_8b_float8.toml"


def test_a_dry_run_tells_all_and_asks_nobody() -> None:
    seconds = []
    for _ in range(3):
        begun = cpu_seconds()
        done = dry_run(BIG, "--num_instances=4", "--dry-run", "--tokens-per-second=8624", *DATA)
        seconds.append(cpu_seconds() - begun)
    assert done.returncode == 0, done.stderr
    for words in (
        "4 x ml.p5.48xlarge: 32 x H100 of 80 GiB, EFA between them", "16 bytes x 8.03 billion parameters / 32 shares = 3.74 GiB",
        "$253.20 an hour (4 x $63.30, us-east-1, on demand, 2026-09, second-hand); at most $6,076.80 in --max-hours 24",
        "whole run   10.6 hours, $2,672.41, at 8,624 tokens/s of a GPU", "recipes/pretrain.py", "nothing speaks against it",
    ):  # fmt: skip
        assert words in done.stdout
    assert "tests/" not in done.stdout and "docs/" not in done.stdout
    assert min(seconds) < 2.0, seconds
    alone = dry_run(BIG, "--num_instances=4", "--dry-run", "--json", *DATA)
    request = json.loads(alone.stdout)
    assert request["ResourceConfig"]["InstanceCount"] == 4
    assert "--data.path=/opt/ml/input/data/data-path" in request["AlgorithmSpecification"]["ContainerArguments"]


def test_a_former_run_says_how_fast_it_is(tmp_path: Path) -> None:
    speeds = [100.0, 64000.0, 32000.0, 64000.0]
    lines = [{"step": n, "loss": 1.0, "tokens_per_second": speed} for n, speed in enumerate(speeds)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "environment.json").write_text('{"processes": 8}')
    words = (BIG, "--num_instances=4", "--dry-run", f"--measured={tmp_path}/metrics.jsonl", *DATA)
    assert "at 6,000 tokens/s of a GPU" in dry_run(*words).stdout
    (tmp_path / "environment.json").unlink()
    assert f"--measured {tmp_path}/metrics.jsonl: not the metrics.jsonl of a run" in dry_run(*words).stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([BIG], "--region is missing, and neither AWS_REGION nor your AWS configuration names one"),
        ([BIG, "--region=us-east-1"], "--role is missing: the ARN of a role for the job"),
        ([BIG, "--dry-run"], "data.path = 'data/llama3' is a path of this machine, which the job does not see: copy it to S3"),
        ([BIG, "--dry-run"], "tokenizer.encoding = 'assets/llama3/tokenizer.model': there is no such file here to send along"),
        ([BIG, "--dry-run", "--instance-type=p5.48xlarg"], "not a machine that this toolkit knows; did you mean ml.p5.48xlarge?"),
        ([BIG, "--dry-run", "--instance=4"], "--instance: there is no such option; did you mean --instances?"),
        ([BIG, "--dry-runn"], "--dry-runn: there is no such option; did you mean --dry-run?"),
        (["lst"], "lst: there is no such command, nor such a recipe; did you mean list?"),
        ([BIG, "--dry-run", "--parallelism.tensor=16"], "parallelism.tensor = 16 does not divide model.num_kv_heads = 8"),
        ([BIG, "--dry-run", "--training.stps=5"], "training.stps"),
        ([BIG, "--dry-run", "--run.dir=here", *DATA], "--run.dir=here: on SageMaker the job has its own place for this; use --run"),
        ([BIG, "--dry-run", "--region=il-central-1"], "AWS's image lies in another account there; give its address as --image"),
        ([BIG, "--dry-run", "--channel=data.pth=s3://a/b"], "--channel data.pth=s3://a/b: give one of the keys data.path, "),
        ([BIG, "--dry-run", "--channel=data.path=/here"], "give s3://BUCKET/PREFIX or fsx://FILESYSTEM/MOUNT/FOLDER"),
        ([BIG, "--dry-run", "--channel=data.path=s3://a/b,Pipe"], "Pipe is no way to read; use File or FastFile"),
        ([BIG, "--dry-run", "--checkpoints=s3://a/b"], "--checkpoints s3://a/b: give fsx://FILESYSTEM/MOUNT/FOLDER"),
        (["train_configs/lama.toml", "--dry-run"], "train_configs/lama.toml: there is no such recipe"),
        (
            ["train_configs/llama3_405b.toml", "--num_instances=8", "--dry-run", *DATA],
            "weights, gradients and optimizer state alone do not fit: ",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_is_sent(words: list[str], problem: str) -> None:
    done = dry_run(*words)
    assert done.returncode == 2 and problem in done.stderr, done.stderr
    assert done.stdout == ""
