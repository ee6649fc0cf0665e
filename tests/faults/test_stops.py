"""Signals to ranks: all stop after the same step, save it, and the resumed run equals an undisturbed one."""

import signal
import time
from pathlib import Path

import pytest

from tests.faults.faulty import WRITING, Fault
from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, trained, valid_steps
from tests.launching import ROOT, records


@pytest.mark.parametrize(
    ("name", "rank", "what", "step", "last"),
    [
        # Before the ranks exchange requests in step 3, where the loop has computed the learning rate of step 2; and after it, so
        # that step 4 is the last.
        ("SIGUSR1", 1, "titanlike.distributed.watchdog.Watchdog.step", 2, 3),
        pytest.param("SIGINT", 0, "titanlike.distributed.watchdog.Watchdog.step", 2, 3, marks=pytest.mark.slow),
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


@pytest.mark.slow
def test_signal_during_a_save(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """Both the save in progress and that of the last step are committed."""
    job = starter.start(
        tmp_path,
        Fault(WRITING, "inside", rank=0, step=2, do="SIGTERM, mark writing, sleep 1"),
        Fault("torch.Tensor.backward", rank=0, step=3, do="await writing"),  # however slow the writing thread is
    )
    assert job.wait() == [143, 143], job.output
    last = valid_steps(tmp_path / "runs/run/checkpoints")
    assert last in ([2, 3], [2, 4])
    assert f"stopped by SIGTERM; to resume from step {last[-1]}: " in job.output
    assert f"resumed at step {last[-1]}\n" in resume(starter, tmp_path).output
    found = trained(tmp_path)
    assert found.losses == undisturbed.losses
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
def test_killed_in_the_save_after_a_signal(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """As a scheduler does after its time limit."""
    job = starter.start(
        tmp_path,
        Fault("titanlike.distributed.watchdog.Watchdog.step", rank=0, step=4, do="SIGTERM"),  # at the start of step 5
        Fault(WRITING, "inside", rank=1, step=5),
    )
    assert job.wait_for_a_death()[1] == -9
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2, 4]
    assert "resumed at step 4\n" in resume(starter, tmp_path).output
    assert_as_undisturbed(tmp_path, undisturbed)
