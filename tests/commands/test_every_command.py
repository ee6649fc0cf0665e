"""All commands of `titanlike`, found in its parser: output that cannot be written, a removed working directory.

A new command needs a line in `invocations`.
"""

import argparse
import gzip
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forkserver import ROOT, Forked
from tests.interop.models import LLAMA, export_model, model_of
from tests.launching import environment
from titanlike.run import launch
from titanlike.tools.cli.main import build_parser, main

DEBUG = str(ROOT / "train_configs/debug.toml")


def commands(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields the name of each command and its parser."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for name, inner in group.choices.items():
            yield from commands(inner, *words, name)
    if not groups:
        yield " ".join(words), parser


COMMANDS = dict(commands(build_parser()))


def invocations(folder: Path) -> dict[str, list[str]]:
    """Returns arguments with which each command prints a result: positional ones, then options."""
    run, model, text = str(folder / "run"), str(folder / "model"), str(folder / "text.txt")
    return {
        "train": [DEBUG, "--check=1"],
        "schema": [],
        "recipes copy": ["debug", "copied"],
        "verify": [DEBUG, "--layout=tensor=1", "--steps=1"],
        "init": ["new.toml", "--gpus=0"],
        "doctor": [],
        "plan": [DEBUG, "--gpus=1"],
        "launch slurm": [DEBUG, "--dry-run", "--gpus-per-node=1"],
        "launch kubernetes": [DEBUG, "--dry-run", "--gpus-per-node=1", "--image=image", "--claim=claim"],
        "launch skypilot": [DEBUG, "--dry-run", "--gpus-per-node=1", "--checkpoint.dir=s3://bucket/runs"],
        "launch sagemaker": [DEBUG, "--dry-run"],
        "launch docker": [DEBUG, "--dry-run", "--gpus-per-node=1"],
        "profile": [run],
        "compare": [run],
        "sweep": [str(ROOT / "sweep_configs/debug.toml"), "--dry-run"],
        "export": [model, "exported"],
        "import": [model, "imported.toml"],
        "data prepare": [text, "--out=tokens", "--tokenizer=bytes", "--workers=1"],
        "data train-tokenizer": [text, "--out=tokenizer.json", "--vocab-size=280"],
        "data inspect": [DEBUG, f"--data.path={text}"],
        "generate": [model, "--prompt=a", "--tokens=2"],
        "evaluate": [model, f"--data={text}", "--seq-len=32"],
        "lm_eval": ["--help"],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a model, and the directory of a run with a trace."""
    path: Path = tmp_path_factory.mktemp("commands")
    (path / "text.txt").write_text("some text of a document\n" * 200)
    export_model(model_of(LLAMA), LLAMA, path / "model")
    run = path / "run"
    (run / "profile").mkdir(parents=True)
    shutil.copy(DEBUG, run / "recipe.toml")
    (run / "environment.json").write_text(json.dumps({"processes": 1, "device": "cpu"}))
    record = {"step": 10, "loss": 1.0, "tokens_per_second": 1.0, "step_seconds": 1.0, "memory_gib": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    step = {"ph": "X", "cat": "user_annotation", "name": "step 10", "ts": 0, "dur": 10, "tid": 1}
    with gzip.open(run / "profile/step-10-rank-0.json.gz", "wt") as file:
        json.dump({"traceEvents": [step]}, file)
    return path


def start(folder: Path, words: list[str], output: int) -> tuple[int, str]:
    """Runs a program with its output at a descriptor. Returns its exit code and what it wrote to stderr."""
    done = Forked(
        [sys.executable, *words], cwd=folder, env=environment(NPROC="1"), stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    _, errors = done.communicate(timeout=300)
    return done.returncode, errors


def start_without_reader(folder: Path, words: list[str]) -> tuple[int, str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return start(folder, words, writer)
    finally:
        os.close(writer)


def start_on_full_disk(folder: Path, words: list[str]) -> tuple[int, str]:
    with Path("/dev/full").open("wb") as full:
        return start(folder, words, full.fileno())


PROGRAMS = {
    **{name: ["-m", "titanlike.tools.cli.main", *name.split()] for name in COMMANDS},
    "run_train.sh --help": [launch.__file__, "--help"],
    "run_train.sh --resolved": [launch.__file__, DEBUG, "--resolved"],
    "run_train.sh --check": [launch.__file__, DEBUG, "--check=1"],
    "sagemaker/launch.py": [str(ROOT / "sagemaker/launch.py"), DEBUG, "--dry-run", "--region=us-east-1"],
}
for target in ("docker", "skypilot"):  # build a wheel first; they print as the others of `launch` do
    del PROGRAMS[f"launch {target}"]
if importlib.util.find_spec("lm_eval") is None:  # an extra; without it the command prints nothing but how to install it
    del PROGRAMS["lm_eval"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_closed_pipe_ends_the_program_without_a_message(name: str, folder: Path, tmp_path: Path) -> None:
    words = [*PROGRAMS[name], *invocations(folder).get(name, [])]
    code, errors = start_without_reader(tmp_path, words)
    assert (code, errors) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "name", ["train", "plan", "data prepare", "generate", "run_train.sh --help", "sagemaker/launch.py"]
)
def test_output_on_a_full_disk_is_one_sentence(name: str, folder: Path, tmp_path: Path) -> None:
    words = [*PROGRAMS[name], *invocations(folder).get(name, [])]
    code, errors = start_on_full_disk(tmp_path, words)
    message = "error: the output cannot be written: No space left on device; free some space, or write it elsewhere\n"
    assert (code, errors) == (2, message)


def test_output_that_is_still_buffered_at_the_exit(tmp_path: Path) -> None:
    """A pipe and a file are buffered by an interpreter, unlike in forked processes."""
    command = [
        sys.executable, "-m", "titanlike.tools.cli.main", "sweep", str(ROOT / "sweep_configs/debug.toml"), "--dry-run",
    ]  # fmt: skip
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(PYTHONUNBUFFERED=""), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written: No space left") and done.stderr.count("\n") == 1


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Runs a command in this process, which has to refuse it. Returns its error."""
    monkeypatch.setattr(sys, "argv", ["titanlike", *words])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stopped:
        main()
    signal.signal(signal.SIGINT, before)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert all(line.isprintable() for line in errors.split("\n")), ascii(errors)
    return errors


@pytest.mark.parametrize("name", COMMANDS)
def test_a_removed_working_directory_is_one_sentence(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    errors = refusal(capsys, monkeypatch, *name.split(), *invocations(folder)[name])
    assert errors == "error: the working directory was removed; change to another directory\n"
