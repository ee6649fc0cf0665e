"""Signals to ranks: all stop after the same step, save it, and the resumed run equals an undisturbed one."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.faulty import WRITING, Fault, variables
from tests.faults.starting import OPTIONS, Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, trained, valid_steps
from tests.launching import ROOT, descendants, records, start, wait_for


@pytest.mark.parametrize(
    ("name", "rank", "what", "step", "last"),
    [
        # Before the ranks exchange requests in step 3, where the loop has computed the learning rate of step 2; and after it, so
        # that step 4 is the last.
        ("SIGUSR1", 1, "titanlike.distributed.watchdog.Watchdog.step", 2, 3),
        pytest.param("SIGTERM", 0, "titanlike.metrics.Monitor.step", 3, 4, marks=pytest.mark.slow),
    ],
)
def test_signal_to_one_rank_stops_all(
    starter: Starter, undisturbed: Trained, tmp_path: Path, name: str, rank: int, what: str, step: int, last: int
) -> None:
    evaluation = {"evaluation.interval": "3", "evaluation.data": f'["{ROOT / "README.md"}"]', "evaluation.limit": "1"}
    job = starter.start(tmp_path, Fault(what, rank=rank, step=step, do=name), **evaluation)
    number = signal.Signals[name]
    assert job.wait() == [128 + number] * 2, job.output
    shutdown_message = f"stopped by {name}; to resume from step {last}: titanlike train runs/run/recipe.toml\n"
    assert job.output.count(shutdown_message) == 1
    assert "Traceback" not in job.output
    assert valid_steps(tmp_path / "runs/run/checkpoints")[-1] == last
    assert list(trained(tmp_path).losses) == list(range(1, last + 1))
    assert f"resumed at step {last}\n" in resume(starter, tmp_path, **evaluation).output
    found = trained(tmp_path)
    assert found.losses == undisturbed.losses
    # The last step before a shutdown is validated and evaluated by the resumed run.
    assert found.validation == undisturbed.validation
    evaluated = [one["step"] for one in records(tmp_path / "runs/run") if "evaluation/README/loss" in one]
    assert evaluated == [3, 6]
    assert found.hashes[6] == undisturbed.hashes[6]


def test_second_ctrl_c_exits_at_once(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    job = starter.start(
        tmp_path, *(Fault(WRITING, "inside", rank, step=4, do=f"mark {rank}, sleep 600") for rank in (0, 1))
    )
    for rank in (0, 1):
        job.wait_for(tmp_path / f"{rank}.mark")
    job.signal(signal.SIGINT)
    job.wait_for_output("stopping after this step or the next; press Ctrl-C again to exit at once\n")
    time.sleep(0.5)
    assert job.codes == [None, None]
    job.signal(signal.SIGINT)
    assert job.wait(300) == [130, 130], job.output  # does not wait for the write
    assert "stopped; to resume from step 2: titanlike train runs/run/recipe.toml\n" in job.output
    assert "Traceback" not in job.output
    assert "resumed at step 2\n" in resume(starter, tmp_path).output
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_second_ctrl_c_reaches_the_processes_of_a_launcher(tmp_path: Path) -> None:
    stuck = [Fault(WRITING, "inside", rank, step=4, do=f"mark {rank}, sleep 600") for rank in (0, 1)]
    options = OPTIONS | {"run.shutdown_timeout": "600"}
    job = start(tmp_path, {"NPROC": "2", "OMP_NUM_THREADS": "1", **variables(*stuck)}, **options)
    try:
        for rank in (0, 1):
            wait_for(tmp_path / f"{rank}.mark", 120)
        job.send_signal(signal.SIGINT)
        time.sleep(2)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=300)  # waits neither for the write nor for the shutdown timeout
    finally:
        if job.poll() is None:
            for process in descendants(job.pid):
                os.kill(process, signal.SIGKILL)
            job.communicate()
    assert job.returncode == 130
    assert "press Ctrl-C again to exit at once\n" in errors
    assert "stopped; to resume from step 2: titanlike train runs/run/recipe.toml\n" in errors
    assert "Traceback" not in errors
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2]
