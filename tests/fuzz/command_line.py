"""Runs `./run_train.sh` in this process, as the fuzzers do for each case."""

import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401  imported by some commands, which alone takes longer than a case may

CPU_LIMIT = 2.0  # seconds of a case
LENGTH_LIMIT = 1500  # characters of an error
SENTENCE = re.compile(r"error: .*\w.{10,}")


@dataclass(frozen=True)
class Outcome:
    """The exit code of a program that ran in this process, and its output."""

    code: object
    output: str
    errors: str

    @property
    def accepted(self) -> bool:
        return self.code in (0, None)


def run(program: Callable[[], object], argv: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Outcome:
    """Runs a program that parses `sys.argv`, in a folder and an environment. Checks how it ends and the CPU time."""
    output, errors = io.StringIO(), io.StringIO()
    code: object = 0
    with _process_state(folder, variables), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        sys.argv = ["program", *argv]
        start = time.process_time()
        try:
            program()
        except SystemExit as stop:
            code = stop.code
        used = time.process_time() - start
    outcome = Outcome(code, output.getvalue(), errors.getvalue())
    assert used < CPU_LIMIT, f"{used:.1f} s of CPU time: {outcome}"
    assert outcome.accepted or code == 2, outcome
    if not outcome.accepted:
        assert_sentences(outcome.errors)
    return outcome


def assert_sentences(errors: str) -> None:
    """Every line is an error that can be printed; nothing else is."""
    lines = errors.splitlines()
    assert lines, "no error"
    for line in lines:
        assert SENTENCE.fullmatch(line), errors
        assert line.isprintable(), ascii(errors)
        assert len(line) <= LENGTH_LIMIT, errors
    assert "Traceback" not in errors


def train(argv: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> Outcome:
    """Runs the program behind `./run_train.sh` with arguments that start nothing, such as `--check=2`."""
    from titanlike.run import launch

    return run(launch.main, argv, folder, variables or {})


@contextlib.contextmanager
def _process_state(folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Restores what the programs change in their process."""
    environ, argv, path, working_directory = dict(os.environ), sys.argv, list(sys.path), Path.cwd()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)}
    os.chdir(folder)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.chdir(working_directory)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv, sys.path[:] = argv, path
        for number, handler in signals.items():
            signal.signal(number, handler)
