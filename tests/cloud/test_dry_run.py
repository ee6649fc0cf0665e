"""`titanlike launch sagemaker --dry-run`: its report and its errors, without credentials and without a network."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, Cli
from titanlike.tools.cli import main as titanlike

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


def request_of(output: str) -> dict[str, Any]:
    return json.loads(output[output.index("\n{") :])


DATA = ("--channel=data.path=s3://tokens/c4", "--channel=tokenizer.encoding=s3://tokens/llama3/tokenizer.model")
BIG = "train_configs/llama3_8b_float8.toml"
DEBUG = "train_configs/debug.toml"
LORA = "train_configs/finetune_llama3_8b.toml"
CHATS = "--channel=data.path=s3://tokens/chats"


def test_dry_run_report() -> None:
    done = dry_run(BIG, "--nodes=4", "--dry-run", *DATA)
    assert done.returncode == 0, done.stderr
    for text in (
        "4, 32 GPUs: H100 SXM 80 GB (ml.p5.48xlarge), EFA", "recipes/pretrain.py",
        "request     valid according to botocore's model of the service",
    ):  # fmt: skip
        assert text in done.stdout
    assert re.search(r"^plan  .* GiB per GPU, [\d,]+ tokens/s per GPU .* hours, \$", done.stdout, re.MULTILINE)
    # The library's files are one line, so that the summary fits on a screen.
    lines = done.stdout.splitlines()
    assert lines.index("{") < 30
    assert any(re.fullmatch(r" *[\d,]+  titanlike/: \d{3} files", line) for line in lines)
    assert "tests/" not in done.stdout and "docs/" not in done.stdout
    request = request_of(done.stdout)
    assert request["ResourceConfig"]["InstanceCount"] == 4
    assert "--data.path=/opt/ml/input/data/data_path" in request["AlgorithmSpecification"]["ContainerArguments"]


def test_files_beside_the_recipe_and_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Cli) -> None:
    """A tokenizer's folder, with its chat template; weights from a channel; and data that only channels name."""
    monkeypatch.chdir(ROOT)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / name).write_text("{}")
    (tmp_path / "mine.jinja").write_text("")
    weights = (f"--tokenizer.encoding={tmp_path}/hf", "--channel=checkpoint.initial=s3://models/llama", CHATS)
    words = ["--instance-type=ml.p5.4xlarge", *weights, f"--data.chat_template={tmp_path}/mine.jinja"]
    output = program(titanlike.main, "launch", "sagemaker", LORA, "--dry-run", *words).out
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert f"  tokenizer/{name}\n" in output
    assert "  chat_template/template.jinja\n" in output
    assert "config.json\n" not in output.replace("_config", "")
    for argument in (
        "--tokenizer.encoding=tokenizer/tokenizer.json", "--data.chat_template=chat_template/template.jinja",
        "--checkpoint.initial=/opt/ml/input/data/checkpoint_initial", "--run.dir=/opt/ml/checkpoints",
    ):  # fmt: skip
        assert f'"{argument}"' in output
    mixed = ("--channel=data.mixture=s3://a/x", "--channel=data.mixture=s3://a/y", DATA[1])
    output = program(titanlike.main, "launch", "sagemaker", BIG, "--nodes=4", "--dry-run", *mixed).out
    assert "--data.path=" in request_of(output)["AlgorithmSpecification"]["ContainerArguments"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([BIG], "--region is missing, and neither AWS_REGION nor the AWS configuration sets one"),
        ([BIG, "--dry-run"], "data.path = 'data/llama3' is a local path, which the job cannot read: copy it to S3"),
        ([BIG, "--dry-run"], "tokenizer.encoding = 'assets/llama3/tokenizer.model': no such file; create it, or add --channel"),
        ([BIG, "--dry-run", "--instance-type=p5.48xlarg"], "ml.p5.48xlarg is unknown; did you mean ml.p5.48xlarge?"),
        ([BIG, "--dry-run", "--run.dir=here", *DATA], "--run.dir=here: the job sets this key itself; use --run"),
        ([BIG, "--dry-run", "--spot", "--checkpoint.resume_from=8", *DATA], "resume_from = 8: a job that was interrupted would"),
        ([LORA, "--dry-run", CHATS], "initial = 'Llama-3.1-8B-Instruct' is a local path, which the job cannot read: copy it to"),
        ([BIG, "--dry-run", "--region=il-central-1"], "the account of the AWS image is unknown; set its URI with --image"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(arguments: list[str], error: str, monkeypatch: pytest.MonkeyPatch, program: Cli) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in ISOLATION.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("opened a socket"))
    monkeypatch.chdir(ROOT)
    printed = program(titanlike.main, "launch", "sagemaker", *arguments, code=2)
    assert error in printed.err and printed.out == ""
