"""SIGKILL at every stage of a step and of a save: committed checkpoints remain, and the resumed run equals an undisturbed one."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.faulty import WRITING, Fault
from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, valid_steps, warnings_of

SAVING, STORE, FOLDER = (
    "titanlike.checkpoint.saver",
    "titanlike.checkpoint.store",
    "titanlike.checkpoint.store.LocalStore",
)


@dataclass(frozen=True)
class Case:
    """Where a rank dies, and the steps whose checkpoints then exist."""

    faults: tuple[Fault, ...]
    committed: tuple[int, ...]
    mode: str = "async"
    keep: int = 9


def dies(what: str, when: str = "before", *, rank: int, step: int, argument: str = "") -> tuple[Fault, ...]:
    return (Fault(what, when, rank, step, argument=argument),)


# During a step. Synchronous saves make the newest checkpoint predictable.
STEPS = {
    "before the step": Case(dies("titanlike.optim.schedule.set_learning_rate", rank=0, step=5), (2, 4), "sync"),
    "between forward and backward": Case(dies("torch.Tensor.backward", rank=1, step=5), (2, 4), "sync"),
    "after the backward pass": Case(dies("torch.Tensor.backward", "after", rank=0, step=5), (2, 4), "sync"),
    "after the norms": Case(dies("titanlike.optim.clipping.gradient_norms", "after", rank=1, step=5), (2, 4), "sync"),
    "before the update": Case(dies("titanlike.optim.optimizer.AdamW.step", rank=0, step=5), (2, 4), "sync"),
    "after the update": Case(dies("titanlike.optim.optimizer.AdamW.step", "after", rank=1, step=4), (2,), "sync"),
    "in validation": Case(
        dies("titanlike.data.batches.loader.BatchLoader.first_batches", rank=1, step=3), (2,), "sync"
    ),
    "after the record": Case(dies("titanlike.metrics.Monitor.step", "after", rank=0, step=5), (2, 4), "sync"),
}

ONE_SHARD = (
    Fault(f"{SAVING}.CheckpointManager._write", "after", rank=0, step=4, do="mark written"),
    Fault(f"{SAVING}.CheckpointManager._write", "before", rank=1, step=4, do="await written, SIGKILL"),
)
# During the save of step 4. All ranks take part in the first half, only rank 0 in the second.
SAVES = {
    "before the copy": Case(dies(f"{SAVING}.StagingBuffers.copy", rank=1, step=4), (2,)),
    "after the copy": Case(dies(f"{SAVING}.StagingBuffers.copy", "after", rank=0, step=4), (2,), "sync"),
    "before there is a folder": Case(dies(f"{FOLDER}.begin", rank=0, step=4), (2,)),
    "when there is a folder": Case(dies(f"{FOLDER}.begin", "after", rank=0, step=4), (2,), "sync"),
    "before its shard": Case(dies(f"{FOLDER}.create", rank=1, step=4, argument="rank-00001.safetensors"), (2,)),
    "in the middle of its shard": Case(dies(WRITING, "inside", rank=1, step=4), (2,)),
    "in the middle of the first shard": Case(dies(WRITING, "inside", rank=0, step=4), (2,), "sync"),
    "between the shards": Case(ONE_SHARD, (2,)),
    "after its shard": Case(dies(f"{SAVING}.CheckpointManager._write", "after", rank=1, step=4), (2,), "sync"),
    "when all shards are there": Case(dies(f"{STORE}.complete", rank=0, step=4), (2,)),
    "between state and manifest": Case(
        dies(f"{FOLDER}.create", rank=0, step=4, argument="manifest.json"), (2,), "sync"
    ),
    "after the manifest": Case(dies(f"{FOLDER}.publish", rank=0, step=4), (2,), keep=1),
    "before the rename": Case(dies("pathlib.Path.rename", rank=0, step=4), (2,), "sync"),
    "after the rename": Case(dies("pathlib.Path.rename", "after", rank=0, step=4), (2, 4)),
    "after the commit": Case(dies(f"{FOLDER}.publish", "after", rank=0, step=4), (2, 4), "sync"),
    "before latest has its name": Case(dies("pathlib.Path.replace", rank=0, step=4), (2, 4)),
    "before the old one goes": Case(dies(f"{FOLDER}.remove", rank=0, step=4), (2, 4), keep=1),
    "while the old one goes": Case(dies("shutil.rmtree", rank=0, step=4), (4,), keep=1),
    "with half of the old one gone": Case(dies("os.unlink", "after", rank=0, step=4), (4,), "sync", keep=1),
    "after everything": Case(dies(f"{STORE}.prune", "after", rank=0, step=4), (2, 4)),
    "in the first save": Case(dies(WRITING, "inside", rank=0, step=2), ()),
    "after the last commit": Case(dies(f"{FOLDER}.publish", "after", rank=0, step=6), (2, 4, 6)),
}
DEFAULT_TIER = {
    "between forward and backward", "in the middle of its shard", "after the manifest", "after the rename",
}  # fmt: skip
SLOW_TIER = {
    "after the norms", "after the update", "before there is a folder", "when all shards are there", "after the copy",
    "before the rename", "while the old one goes", "in the first save", "between the shards", "with half of the old one gone",
}  # fmt: skip


def tier(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in DEFAULT_TIER else [pytest.mark.slow if name in SLOW_TIER else pytest.mark.every]


CASES = [pytest.param(case, id=name, marks=tier(name)) for name, case in (STEPS | SAVES).items()]


@pytest.mark.parametrize("case", CASES)
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
    ("what", "when", "newest"),
    [
        pytest.param(WRITING, "inside", 2, id="while all write"),
        pytest.param("titanlike.optim.optimizer.AdamW.step", "after", 2, id="after the update", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_are_killed(
    starter: Starter, undisturbed: Trained, tmp_path: Path, what: str, when: str, newest: int
) -> None:
    stuck = [Fault(what, when, rank, step=4, do=f"mark {rank}, sleep 60") for rank in range(2)]
    job = starter.start(tmp_path, *stuck)
    for rank in range(2):
        job.wait_for(tmp_path / f"{rank}.mark")
    job.kill()
    assert job.codes == [-9, -9]
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [newest]
    assert f"resumed at step {newest}\n" in resume(starter, tmp_path).output
    assert_as_undisturbed(tmp_path, undisturbed)


def test_nan_loss_on_one_rank(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    job = starter.start(tmp_path, Fault("torch.Tensor.backward", "after", 1, step=5, do="spoil"))
    assert job.wait() == [2, 2], job.output
    assert "error: step 5: the loss is nan on rank 1. The step was not saved" in job.output
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2, 4]
    assert "resumed at step 4\n" in resume(starter, tmp_path).output
    assert_as_undisturbed(tmp_path, undisturbed)


def test_late_write_saves_the_state_of_its_step(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """Steps that run while a checkpoint is being written do not change it."""
    late = [Fault(WRITING, "inside", rank, step=2, do="await four") for rank in (0, 1)]
    four = Fault("titanlike.optim.schedule.set_learning_rate", rank=0, step=4, do="mark four")
    job = starter.start(tmp_path, *late, four)
    assert job.wait() == [0, 0], job.output
    assert job.output.index("step      3/6  loss") < job.output.index("step      2/6  saved")
    assert_as_undisturbed(tmp_path, undisturbed)
