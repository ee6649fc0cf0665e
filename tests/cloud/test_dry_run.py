"""`sagemaker/launch.py --dry-run`: its report and its errors, without credentials and without a network."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import launch
import pytest
from report import measured_speed

from tests.launching import ROOT, Cli, cpu_seconds
from titanlike.config import UserError

ISOLATION = {
    "AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


def dry_run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a dry run without credentials, in a process where opening a socket raises an error."""
    code = (
        "import socket, sys, runpy\n"
        "def refuse(*_, **__): raise AssertionError('opened a socket')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "sys.argv = ['launch.py', *sys.argv[1:]]\n"
        f"sys.path[0] = {str(ROOT / 'sagemaker')!r}\n"
        f"runpy.run_path({str(ROOT / 'sagemaker/launch.py')!r}, run_name='__main__')\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=inherited | ISOLATION | environ,
    )


DATA = ("--channel=data.path=s3://tokens/c4", "--channel=tokenizer.encoding=s3://tokens/llama3/tokenizer.model")
BIG = "train_configs/llama3_8b_float8.toml"
DEBUG = "train_configs/debug.toml"
LORA = "train_configs/finetune_llama3_8b.toml"
CHATS = "--channel=data.path=s3://tokens/chats"


def test_dry_run_report() -> None:
    seconds = []
    for _ in range(3):
        start = cpu_seconds()
        done = dry_run(BIG, "--instances=4", "--dry-run", "--tokens-per-second=8624", *DATA)
        seconds.append(cpu_seconds() - start)
        if seconds[-1] < 2.0:
            break
    assert done.returncode == 0, done.stderr
    for text in (
        "4, 32 GPUs: H100 SXM 80 GB (ml.p5.48xlarge), 79.1 GiB each, connected by EFA",
        "memory      3.74 GiB of weights, gradients and optimizer state per GPU",
        "$253.20 an hour (4 x $63.30, us-east-1, on-demand, 2026-09, unofficial); at most $6,076.80 in --max-hours 24",
        "full run    10.6 hours, $2,672.41, at 8,624 tokens/s per GPU", "recipes/pretrain.py",
        "request     valid according to botocore's model of the service",
    ):  # fmt: skip
        assert text in done.stdout
    # The price comes first, and the library's files are one line, so that the summary fits on a screen.
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["job", "price", "full"]
    assert lines.index("create_training_job request:") < 32
    assert any(re.fullmatch(r" *[\d,]+  titanlike/: \d{3} files", line) for line in lines)
    assert "tests/" not in done.stdout and "docs/" not in done.stdout
    assert min(seconds) < 2.0, seconds
    done = dry_run(BIG, "--instances=4", "--dry-run", "--json", *DATA)
    request = json.loads(done.stdout)
    assert request["ResourceConfig"]["InstanceCount"] == 4
    assert "--data.path=/opt/ml/input/data/data_path" in request["AlgorithmSpecification"]["ContainerArguments"]


def test_files_beside_the_recipe_and_channels(tmp_path: Path) -> None:
    """A tokenizer's folder, with its chat template; weights from a channel; and data that only channels name."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / name).write_text("{}")
    (tmp_path / "mine.jinja").write_text("")
    weights = (f"--tokenizer.encoding={tmp_path}/hf", "--channel=checkpoint.initial=s3://models/llama", CHATS)
    done = dry_run(
        LORA, "--dry-run", "--instance-type=ml.p5.4xlarge", *weights, f"--data.chat_template={tmp_path}/mine.jinja"
    )
    assert done.returncode == 0, done.stderr
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert f"  tokenizer/{name}\n" in done.stdout
    assert "  chat_template/template.jinja\n" in done.stdout and "config.json\n" not in done.stdout.replace(
        "_config", ""
    )
    for argument in (
        "--tokenizer.encoding=tokenizer/tokenizer.json", "--data.chat_template=chat_template/template.jinja",
        "--checkpoint.initial=/opt/ml/input/data/checkpoint_initial", "--run.dir=/opt/ml/checkpoints",
    ):  # fmt: skip
        assert f'"{argument}"' in done.stdout
    assert "memory      15.6 GiB of weights" in done.stdout  # LoRA trains none of them
    mixed = ("--channel=data.mixture=s3://a/x", "--channel=data.mixture=s3://a/y", DATA[1])
    done = dry_run(BIG, "--instances=4", "--dry-run", "--json", *mixed)
    assert done.returncode == 0, done.stderr
    assert "--data.path=" in json.loads(done.stdout)["AlgorithmSpecification"]["ContainerArguments"]


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["llama3_8b", "--instances=8", "--instance-type=ml.p4de.24xlarge"], ["; 2,764 tokens/s per GPU", "(8 x $31.56, "]),
        (["llama3_8b", "--instances=16", "--instance-type=p5.4xlarge"], ["; 928 tokens/s per GPU", "(16 x $7.91, "]),
        (  # Muon has one moment: with two, the state would not fit
            ["llama3_70b", "--instances=3", "--instance-type=p4d.24xlarge", "--training.global_batch_size=192",
             "--optimizer.groups=[{pattern='layers', optimizer='muon'}, {pattern='*'}]"],
            ["memory      33.2 GiB of weights, gradients and optimizer state per GPU"],
        ),
    ],
)  # fmt: skip
def test_plans_are_for_the_instance_type(
    arguments: list[str], texts: list[str], monkeypatch: pytest.MonkeyPatch, program: Cli
) -> None:
    monkeypatch.chdir(ROOT)
    recipe, *others = arguments
    printed = program(launch.main, f"train_configs/{recipe}.toml", "--dry-run", *DATA, *others)
    assert [text for text in texts if text not in printed.out] == []


def test_throughput_of_an_earlier_run(tmp_path: Path) -> None:
    speeds = [100.0, 64000.0, 32000.0, 64000.0]
    lines = [{"step": n, "loss": 1.0, "tokens_per_second": speed} for n, speed in enumerate(speeds)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "environment.json").write_text('{"processes": 8}')
    arguments = (BIG, "--instances=4", "--dry-run", f"--measured={tmp_path}/metrics.jsonl", *DATA)
    assert "at 6,000 tokens/s per GPU" in dry_run(*arguments).stdout
    (tmp_path / "environment.json").unlink()
    assert f"--measured {tmp_path}/metrics.jsonl: not a run's metrics.jsonl" in dry_run(*arguments).stderr


@pytest.mark.parametrize("content", ["[]", '{"processes": "many"}', '{"processes": 0}', "{}"])
@pytest.mark.parametrize("name", ["environment.json", "metrics.jsonl"])
def test_damaged_files_of_an_earlier_run_are_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens_per_second": 100.0}\n')
    (tmp_path / "environment.json").write_text('{"processes": 8}')
    assert measured_speed(tmp_path / "metrics.jsonl") == 12.5
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(content)
    with pytest.raises(
        UserError, match=r"^--measured \S+metrics.jsonl: (not a run's metrics.jsonl|contains no tokens)"
    ):
        measured_speed(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([BIG], "--region is missing, and neither AWS_REGION nor the AWS configuration sets one"),
        ([BIG, "--region=us-east-1"], "--role is missing: the ARN of an IAM role, such as arn:"),
        ([BIG, "--dry-run"], "data.path = 'data/llama3' is a local path, which the job cannot read: copy it to S3"),
        ([BIG, "--dry-run"], "tokenizer.encoding = 'assets/llama3/tokenizer.model': no such file; create it, or add --channel"),
        ([BIG, "--dry-run", "--instance-type=p5.48xlarg"], "unsupported instance type; did you mean ml.p5.48xlarge?"),
        ([BIG, "--dry-run", "--instance-count=4"], "--instance-count: unknown option; did you mean --instances?"),
        ([BIG, "--dry-run", "--instance-tpe=x"], "--instance-tpe: unknown option; did you mean --instance-type?"),
        ([BIG, "--dry-run", "--keep-alive=²"], "argument --keep-alive: expected an integer of at least 1"),
        ([BIG, "--dry-run", "--max-hours=\udcff"], "--max-hours=\\udcff is not text in this terminal's encoding"),
        ([BIG, "--dry-run", "--recipe=other.toml", *DATA], f"{BIG} other.toml: give one recipe"),
        ([BIG, "--dry-runn"], "--dry-runn: unknown option; did you mean --dry-run?"),
        (["lst"], "lst: no such command or recipe; did you mean list?"),
        ([BIG, "--dry-run", "--training.stps=5"], "training.stps"),
        ([BIG, "--dry-run", "--run.dir=here", *DATA], "--run.dir=here: the job sets this key itself; use --run"),
        ([BIG, "--dry-run", "--spot", "--checkpoint.resume_from=8", *DATA], "resume_from = 8: a job that was interrupted would"),
        ([LORA, "--dry-run", CHATS], "tokenizer.encoding = 'Llama-3.1-8B-Instruct': no such file; create it, or add --channel"),
        ([LORA, "--dry-run", CHATS], "initial = 'Llama-3.1-8B-Instruct' is a local path, which the job cannot read: copy it to"),
        (
            [BIG, "--dry-run", "--evaluation.tasks=['piqa.jsonl']", "--evaluation.interval=10", *DATA],
            "evaluation: the job cannot read 'piqa.jsonl'; omit",
        ),
        ([DEBUG, "--dry-run", "--checkpoint.export=newest"], "checkpoint.export"),
        ([BIG, "--dry-run", "--region=il-central-1"], "the account of the AWS image is unknown; set its URI with --image"),
        ([BIG, "--dry-run", "--channel=data.pth=s3://a/b"], "--channel data.pth=s3://a/b: expected one of the keys data.path, "),
        ([BIG, "--dry-run", "--channel=data.path=/here"], "expected s3://BUCKET/PREFIX or fsx://FILESYSTEM/MOUNT/FOLDER"),
        ([BIG, "--dry-run", "--channel=data.path=s3://a/b,Pipe"], "unknown input mode Pipe; use File or FastFile"),
        ([BIG, "--dry-run", "--checkpoints=s3://a/b"], "--checkpoints s3://a/b: expected fsx://FILESYSTEM/MOUNT/FOLDER"),
        (["train_configs/lama.toml", "--dry-run"], "train_configs/lama.toml: recipe not found"),
        (
            ["train_configs/llama3_405b.toml", "--instances=8", "--dry-run", *DATA],
            "weights, gradients and optimizer state do not fit: ",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_refused(arguments: list[str], error: str, monkeypatch: pytest.MonkeyPatch, program: Cli) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in ISOLATION.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("opened a socket"))
    monkeypatch.chdir(ROOT)
    printed = program(launch.main, *arguments, code=2)
    assert error in printed.err and printed.out == ""
