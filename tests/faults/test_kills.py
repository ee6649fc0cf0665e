"""SIGKILL at each stage of a step and of a save: committed checkpoints remain, and the resumed run equals an undisturbed one."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.faulty import WRITING, Fault
from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, valid_steps, warnings_of
from tests.parity import DEFAULT, EVERY, SLOW, Tier, rows_of

SAVER = "titanlike.checkpoint.saver.CheckpointManager"
STORE = "titanlike.checkpoint.store"
FOLDER = "titanlike.checkpoint.store.LocalStore"


@dataclass(frozen=True)
class Case:
    """Where a rank dies, and the steps whose checkpoints then exist."""

    faults: tuple[Fault, ...]
    committed: tuple[int, ...]
    mode: str = "async"
    keep: int = 9


def dies(what: str, when: str = "before", *, rank: int, step: int) -> tuple[Fault, ...]:
    return (Fault(what, when, rank, step),)


ONE_SHARD = (
    Fault(f"{SAVER}._write", "after", rank=0, step=4, do="mark written"),
    Fault(f"{SAVER}._write", "before", rank=1, step=4, do="await written, SIGKILL"),
)
CASES: dict[str, tuple[Tier, Case]] = {
    # During a step. Synchronous saves make the newest checkpoint predictable.
    "between forward and backward": (DEFAULT, Case(dies("torch.Tensor.backward", rank=1, step=5), (2, 4), "sync")),
    "after the update": (
        SLOW, Case(dies("titanlike.optim.optimizer.AdamW.step", "after", rank=1, step=4), (2,), "sync"),
    ),
    "after the record": (EVERY, Case(dies("titanlike.metrics.Monitor.step", "after", rank=0, step=5), (2, 4), "sync")),
    # During the save of step 4. All ranks take part in the first half, only rank 0 in the second.
    "after the copy": (
        SLOW, Case(dies("titanlike.checkpoint.saver.StagingBuffers.copy", "after", rank=0, step=4), (2,), "sync"),
    ),
    "before there is a folder": (EVERY, Case(dies(f"{FOLDER}.begin", rank=0, step=4), (2,))),
    "in the middle of its shard": (DEFAULT, Case(dies(WRITING, "inside", rank=1, step=4), (2,))),
    "between the shards": (SLOW, Case(ONE_SHARD, (2,))),
    "when all shards are there": (EVERY, Case(dies(f"{STORE}.complete", rank=0, step=4), (2,))),
    "after the manifest": (DEFAULT, Case(dies(f"{FOLDER}.publish", rank=0, step=4), (2,), keep=1)),
    "before the rename": (SLOW, Case(dies("pathlib.Path.rename", rank=0, step=4), (2,), "sync")),
    "after the rename": (SLOW, Case(dies("pathlib.Path.rename", "after", rank=0, step=4), (2, 4))),
    "before latest has its name": (EVERY, Case(dies("pathlib.Path.replace", rank=0, step=4), (2, 4))),
    "while the old one goes": (EVERY, Case(dies("shutil.rmtree", rank=0, step=4), (4,), keep=1)),
    "with half of the old one gone": (SLOW, Case(dies("os.unlink", "after", rank=0, step=4), (4,), "sync", keep=1)),
    "in the first save": (SLOW, Case(dies(WRITING, "inside", rank=0, step=2), ())),
    "after the last commit": (EVERY, Case(dies(f"{FOLDER}.publish", "after", rank=0, step=6), (2, 4, 6))),
}  # fmt: skip


@pytest.mark.parametrize("case", rows_of(CASES))
def test_killed_rank(starter: Starter, undisturbed: Trained, tmp_path: Path, case: Case) -> None:
    options = {"checkpoint.mode": case.mode, "checkpoint.keep": str(case.keep)}
    job = starter.start(tmp_path, *case.faults, **options)
    codes = job.wait_for_a_death()
    assert codes[case.faults[-1].rank] == -9, job.output
    assert "Traceback" not in job.output
    checkpoints = tmp_path / "runs/run/checkpoints"
    assert tuple(valid_steps(checkpoints)) == case.committed

    job = resume(starter, tmp_path, **options)
    if case.committed:
        assert f"resumed at step {case.committed[-1]}\n" in job.output
    else:
        assert "runs/run has no checkpoint to resume from: starting at step 1\n" in job.output
    assert warnings_of(job.output) == []
    assert_as_undisturbed(tmp_path, undisturbed)
    assert (checkpoints / "latest").read_text() == "step-00000006\n"


@pytest.mark.parametrize(
    ("what", "committed"),
    [
        ("titanlike.checkpoint.store.manifest_hash", 2),
        pytest.param("titanlike.checkpoint.remote.RemoteStore.publish", 4, marks=pytest.mark.slow),
    ],
)
def test_killed_while_saving_to_a_store_that_does_not_rename_directories(
    starter: Starter, undisturbed: Trained, tmp_path: Path, what: str, committed: int
) -> None:
    """The code path of s3://."""
    options = {"checkpoint.dir": f"file://{tmp_path}/remote", "checkpoint.mode": "sync"}
    job = starter.start(tmp_path, Fault(what, "after", step=4), **options)
    assert job.wait_for_a_death()[0] == -9, job.output
    remote = tmp_path / "remote/run"
    assert max(path.parent.name for path in remote.glob("step-*/manifest.json")) == f"step-0000000{committed}"
    job = resume(starter, tmp_path, **options)
    assert f"resumed at step {committed}\n" in job.output
    assert warnings_of(job.output) == []
    assert_as_undisturbed(tmp_path, undisturbed, remote)
    assert not (tmp_path / "runs/run/checkpoints").exists()


def test_late_write_saves_the_state_of_its_step(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """Steps that run while a checkpoint is being written do not change it."""
    late = [Fault(WRITING, "inside", rank, step=2, do="await four") for rank in (0, 1)]
    four = Fault("titanlike.optim.schedule.set_learning_rate", rank=0, step=4, do="mark four")
    job = starter.start(tmp_path, *late, four)
    assert job.wait() == [0, 0], job.output
    assert job.output.index("step      3/6  loss") < job.output.index("step      2/6  saved")
    assert_as_undisturbed(tmp_path, undisturbed)
