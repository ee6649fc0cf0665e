"""A process that dies of a signal that nobody sent fails its test with the stack, and CI does not run that test again."""

import ctypes
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


def _die_in_a_native_thread() -> None:
    library = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    library.pthread_create(
        ctypes.byref(thread), None, ctypes.cast(library.strlen, ctypes.c_void_p), ctypes.c_void_p(16)
    )
    library.pthread_join(thread, None)


def test_the_native_stack_of_the_thread_that_crashes_is_reported(ranks: Ranks) -> None:
    with pytest.raises(Crash, match=r"rank 0 of 1: SIGSEGV\nSIGSEGV.*: \n frame #0:") as error:
        ranks(1).run(_die_in_a_native_thread)
    message = str(error.value)
    assert message.count("frame #0:") == 1  # not those of the threads that wait
    assert "in _die_in_a_native_thread" in message


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


@pytest.mark.parametrize(
    ("message", "runs"),
    [
        ("E   AssertionError: 1 != 2", 2),
        ("E   tests.crashes.Crash: rank 2 of 4: SIGABRT", 1),
        ("worker 'gw1' crashed while running 'tests/test_x.py::test_y'", 1),
    ],
)
def test_ci_runs_a_failed_test_again_unless_a_process_crashed(tmp_path: Path, message: str, runs: int) -> None:
    content = (ROOT / ".ci" / "run").read_text()
    functions = content[content.index("stage()") : content.index("\nscratch=")]
    last = tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
    last.parent.mkdir(parents=True)
    last.write_text('{"tests/test_x.py::test_y": true}')
    script = f"""set -euo pipefail
scratch=.
{functions}
pytest() {{ echo run >> runs; echo "$MESSAGE"; [ "$(wc -l < runs)" = 2 ]; }}
run_tests pytest -m slow
"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=os.environ | {"MESSAGE": message}, capture_output=True, text=True
    )
    assert (tmp_path / "runs").read_text().count("run") == runs
    assert done.returncode == (0 if runs == 2 else 1)
    assert message in done.stdout
