"""Commands whose output cannot be written, or whose working directory was removed.

All commands share what handles this. The ones here print in different ways: plain lines, tables, a status line, results of worker
processes, and text as it is generated.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forkserver import ROOT, Forked
from tests.interop.models import LLAMA, export_model, model_of
from tests.launching import Cli, environment
from titanlike.run import launch

DEBUG = str(ROOT / "train_configs/debug.toml")
CLI = ["-m", "titanlike.tools.cli.main"]
PROGRAMS = {
    "train": [*CLI, "train", DEBUG, "--check=1"],
    "plan": [*CLI, "plan", DEBUG, "--gpus=1"],
    "data prepare": [*CLI, "data", "prepare", "text.txt", "--out=tokens", "--tokenizer=bytes", "--workers=1"],
    "generate": [*CLI, "generate", "model", "--prompt=a", "--tokens=2"],
    "run_train.sh --help": [launch.__file__, "--help"],
    "sagemaker/launch.py": [str(ROOT / "sagemaker/launch.py"), DEBUG, "--dry-run", "--region=us-east-1"],
}


def start(folder: Path, words: list[str], output: int) -> tuple[int, str]:
    """Runs a program with its output at a descriptor. Returns its exit code and what it wrote to stderr."""
    done = Forked(
        [sys.executable, *words], cwd=folder, env=environment(NPROC="1"), stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    _, errors = done.communicate(timeout=300)
    return done.returncode, errors


@contextmanager
def pipe_without_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("name", PROGRAMS)
def test_output_that_cannot_be_written_is_no_stack_trace(name: str, tmp_path: Path) -> None:
    if name == "data prepare":
        (tmp_path / "text.txt").write_text("some text of a document\n" * 200)
    if name == "generate":
        export_model(model_of(LLAMA), LLAMA, tmp_path / "model")
    with pipe_without_reader() as pipe:
        assert start(tmp_path, PROGRAMS[name], pipe) == (128 + signal.SIGPIPE, "")
    with Path("/dev/full").open("wb") as full:
        code, errors = start(tmp_path, PROGRAMS[name], full.fileno())
    message = "error: the output cannot be written: No space left on device; free some space, or write it elsewhere\n"
    assert (code, errors) == (2, message)


def test_output_that_is_still_buffered_at_the_exit(tmp_path: Path) -> None:
    """A pipe and a file are buffered by an interpreter, unlike in forked processes."""
    command = [sys.executable, *CLI, "sweep", str(ROOT / "sweep_configs/debug.toml"), "--dry-run"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(PYTHONUNBUFFERED=""), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written: No space left") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("plan", DEBUG, "--gpus=1"), ("train", DEBUG, "--check=1")], ids=lambda words: words[0]
)
def test_a_removed_working_directory_is_one_sentence(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    message = "error: the working directory was removed; change to another directory\n"
    assert cli(*words, code=2).err == message
