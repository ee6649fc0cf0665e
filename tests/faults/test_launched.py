"""The same through `./run_train.sh`, as a user starts it: what it says, its exit code, and that nothing is lost."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.faulty import WRITING, Fault, variables
from tests.faults.starting import OPTIONS, Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, trained, valid_steps
from tests.launching import descendants, start, wait_for

pytestmark = pytest.mark.slow  # whole starts, one after the other


@contextmanager
def launched(folder: Path, *faults: Fault, **overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Two processes and their launcher. What is left of them at the end is killed."""
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


def pausing(step: int) -> Fault:
    """Long enough to be told something in the middle of a step."""
    return Fault("titanlike.optim.schedule.set_learning_rate", rank=0, step=step, do="mark pausing, sleep 1")


def test_a_process_that_is_killed_while_it_writes(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    with launched(tmp_path, Fault(WRITING, "inside", rank=1, step=4)) as job:
        _, errors = job.communicate(timeout=120)
    assert job.returncode == 1
    assert "error: process 1 was ended by SIGKILL\n" in errors
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2]
    assert "resumed at step 2\n" in resume(starter, tmp_path).said
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.parametrize(
    "name",
    ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.every), pytest.param("SIGUSR1", marks=pytest.mark.every)],
)
def test_the_launcher_is_told_to_stop(starter: Starter, undisturbed: Trained, tmp_path: Path, name: str) -> None:
    with launched(tmp_path, pausing(5)) as job:
        wait_for(tmp_path / "pausing.mark", 120)
        job.send_signal(signal.Signals[name])
        said, errors = job.communicate(timeout=120)
    assert job.returncode == 128 + signal.Signals[name], errors
    (last,) = re.findall(rf"stopped by {name}; to go on from step (\d): ./run_train.sh runs/run/recipe.toml\n", said)
    assert last in "56"
    assert "Traceback" not in errors
    assert valid_steps(tmp_path / "runs/run/checkpoints")[-1] == int(last)
    assert f"resumed at step {last}\n" in resume(starter, tmp_path).said
    found = trained(tmp_path)
    assert found.losses == undisturbed.losses
    assert found.hashes[6] == undisturbed.hashes[6]


@pytest.mark.slow
def test_the_launcher_and_all_its_processes_are_killed_at_once(
    starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    """As when a machine loses its power, but for what the kernel still writes."""
    stuck = [Fault(WRITING, "inside", rank, step=4, do=f"mark {rank}, sleep 60") for rank in (0, 1)]
    with launched(tmp_path, *stuck) as job:
        for rank in (0, 1):
            wait_for(tmp_path / f"{rank}.mark", 120)
        kill(descendants(job.pid))
        job.communicate(timeout=120)
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2]
    assert "resumed at step 2\n" in resume(starter, tmp_path).said
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_second_ctrl_c_reaches_the_processes(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    stuck = [Fault(WRITING, "inside", rank, step=4, do=f"mark {rank}, sleep 600") for rank in (0, 1)]
    with launched(tmp_path, *stuck, **{"run.shutdown_timeout": "600"}) as job:
        for rank in (0, 1):
            wait_for(tmp_path / f"{rank}.mark", 120)
        job.send_signal(signal.SIGINT)
        time.sleep(2)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=300)  # neither the write nor the grace is waited for
    assert job.returncode == 130
    assert "again to leave at once\n" in errors
    assert "stopped; to go on from step 2: ./run_train.sh runs/run/recipe.toml\n" in errors
    assert "Traceback" not in errors
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2]
    resume(starter, tmp_path)
    assert_as_undisturbed(tmp_path, undisturbed)
