"""A process that dies of a signal that nobody sent fails its test with the stack, and CI does not run that test again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crashes import Crash
from tests.forkserver import ROOT, Forked
from tests.pool import Ranks


def _die_of(number: int) -> None:
    os.write(2, b"a message of the C library\n")
    os.kill(os.getpid(), number)


def test_a_rank_that_crashes_is_reported_with_its_stack(ranks: Ranks) -> None:
    with pytest.raises(Crash, match=r"rank 0 of 1: SIGABRT") as error:
        ranks(1).run(_die_of, signal.SIGABRT)
    assert "a message of the C library\nFatal Python error: Aborted" in str(error.value)
    assert "in _die_of" in str(error.value)
    with pytest.raises(AssertionError, match="the process died: SIGKILL\na message of the C library") as killed:
        ranks(1).run(_die_of, signal.SIGKILL)
    assert not isinstance(killed.value, Crash)
    assert ranks(1).run(os.getpid)


@pytest.mark.parametrize("started", [Forked, subprocess.Popen])
def test_a_program_that_crashes_fails_its_test(tmp_path: Path, started: type[subprocess.Popen[str]]) -> None:
    script = tmp_path / "script.py"

    def run(text: str) -> int:
        script.write_text(text)
        job = started([sys.executable, str(script)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        job.communicate(timeout=60)
        return job.returncode

    with pytest.raises(Crash, match=r"(?s)SIGSEGV.*Fatal Python error: Segmentation fault"):
        run("import os; os.kill(os.getpid(), 11)")
    with pytest.raises(Crash, match=r"(?s)exit code 0.*Fatal Python error: Aborted"):  # a process that it starts
        run("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os; os.abort()'])")
    assert run("import os; os.kill(os.getpid(), 9)") == -9
    assert run("raise SystemExit(3)") == 3
