"""Faults in jobs that `./run_train.sh` launches: output, exit codes and recovery."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.faulty import WRITING, Fault, variables
from tests.faults.starting import OPTIONS, Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, valid_steps
from tests.launching import descendants, start, wait_for

pytestmark = pytest.mark.slow  # real jobs, in sequence


@contextmanager
def launched(folder: Path, *faults: Fault, **overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Launches two processes. Kills the remaining ones at the end."""
    job = start(folder, {"NPROC": "2", "OMP_NUM_THREADS": "1", **variables(*faults)}, **OPTIONS | overrides)
    try:
        yield job
    finally:
        if job.poll() is None:
            kill(descendants(job.pid))
            job.communicate()


def kill(processes: list[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_launcher_and_processes_killed_at_once(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """Like a power failure, except that the kernel completes buffered writes."""
    stuck = [Fault(WRITING, "inside", rank, step=4, do=f"mark {rank}, sleep 60") for rank in (0, 1)]
    with launched(tmp_path, *stuck) as job:
        for rank in (0, 1):
            wait_for(tmp_path / f"{rank}.mark", 120)
        kill(descendants(job.pid))
        job.communicate(timeout=120)
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2]
    assert "resumed at step 2\n" in resume(starter, tmp_path).output
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_second_ctrl_c_reaches_the_processes(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    stuck = [Fault(WRITING, "inside", rank, step=4, do=f"mark {rank}, sleep 600") for rank in (0, 1)]
    with launched(tmp_path, *stuck, **{"run.shutdown_timeout": "600"}) as job:
        for rank in (0, 1):
            wait_for(tmp_path / f"{rank}.mark", 120)
        job.send_signal(signal.SIGINT)
        time.sleep(2)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=300)  # waits neither for the write nor for the shutdown timeout
    assert job.returncode == 130
    assert "press Ctrl-C again to exit at once\n" in errors
    assert "stopped; to resume from step 2: titanlike train runs/run/recipe.toml\n" in errors
    assert "Traceback" not in errors
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2]
    resume(starter, tmp_path)
    assert_as_undisturbed(tmp_path, undisturbed)
