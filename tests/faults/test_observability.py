"""Faults of what observes a run: training continues with the same losses, and reports the fault once."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faulty import Fault
from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed

pytestmark = pytest.mark.slow
TENSORBOARD = {"metrics.trackers": '["tensorboard"]'}
LOG = "titanlike.metrics.services.TensorBoardTracker.log"
STEP = "titanlike.optim.schedule.set_learning_rate"


@pytest.fixture
def busy_port() -> Iterator[str]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield str(other.getsockname()[1])


def test_a_tracker_that_fails(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    job = starter.start(tmp_path, Fault(LOG, do="refuse"), **TENSORBOARD | {"checkpoint.mode": "sync"})
    assert job.wait() == [0, 0], job.output
    warning = "warning: TensorBoard is disabled, training continues: No space left on device\n"
    assert job.output.count("warning: ") == job.output.count(warning) == 1
    assert_as_undisturbed(tmp_path, undisturbed)


def test_a_tracker_that_does_not_answer(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """No step waits for it, and the end of the run waits for 10 s."""
    job = starter.start(tmp_path, Fault(LOG, do="sleep 600"), **TENSORBOARD | {"checkpoint.mode": "sync"})
    assert job.wait() == [0, 0], job.output
    assert job.output.count("warning: TensorBoard has not answered for 10 s; its last records may be lost\n") == 1
    assert_as_undisturbed(tmp_path, undisturbed)


def test_a_port_in_use(starter: Starter, undisturbed: Trained, tmp_path: Path, busy_port: str) -> None:
    job = starter.start(tmp_path, **{"metrics.prometheus": f"127.0.0.1:{busy_port}", "checkpoint.mode": "sync"})
    assert job.wait() == [0, 0], job.output
    assert job.output.count(f"127.0.0.1:{busy_port}: Address already in use") == 1
    assert_as_undisturbed(tmp_path, undisturbed)


def test_a_deleted_metrics_file(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    job = starter.start(
        tmp_path, Fault(STEP, step=4, do="mark four, await deleted"), **TENSORBOARD | {"checkpoint.mode": "sync"}
    )
    job.wait_for(tmp_path / "four.mark")
    (tmp_path / "runs/run/metrics.jsonl").unlink()
    (tmp_path / "deleted.mark").touch()
    assert job.wait() == [0, 0], job.output
    assert job.output.count("warning: runs/run/metrics.jsonl was deleted; it is written again\n") == 1
    assert_as_undisturbed(tmp_path, undisturbed)
