"""Checkpoints that are no longer what was saved: named, not believed, and the run goes on from the one before."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, whole_steps

Damage = Callable[[Path], None]
SHARD, MANIFEST, STATE = "rank-00001.safetensors", "manifest.json", "state.json"


def copied(undisturbed: Trained, folder: Path) -> Path:
    """A finished run of our own, to damage. Returns the folder of its checkpoints, of steps 2, 4 and 6."""
    shutil.copytree(undisturbed.folder / "runs", folder / "runs")
    return folder / "runs/run/checkpoints"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    """As a file system may leave what was not on the disk when the power went."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path, place: float = 0.9) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


def flip_in_header(path: Path) -> None:
    flip(path, 0.01)


def delete(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    """For the same file of another step: whole in itself, and still not what belongs there."""
    shutil.copy(path.parent.with_name("step-00000004") / path.name, path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        (SHARD, flip, " is damaged: its content is not what was written"),
        pytest.param(SHARD, flip_in_header, " is damaged: its content", marks=pytest.mark.slow),
        pytest.param(SHARD, truncate, " has ", marks=pytest.mark.slow),
        pytest.param(SHARD, empty, " has 0 bytes of ", marks=pytest.mark.slow),
        pytest.param(SHARD, zero, " is damaged: its content is not what was", marks=pytest.mark.slow),
        pytest.param(SHARD, swap, " is damaged: its content", marks=pytest.mark.slow),
        pytest.param(SHARD, delete, " cannot be read: No such file or directory", marks=pytest.mark.slow),
        (MANIFEST, flip, " is damaged: "),
        pytest.param(MANIFEST, truncate, " is damaged: ", marks=pytest.mark.slow),
        pytest.param(MANIFEST, empty, " is damaged: ", marks=pytest.mark.slow),
        pytest.param(MANIFEST, zero, " is damaged: ", marks=pytest.mark.slow),
        pytest.param(MANIFEST, swap, " is damaged: its hash", marks=pytest.mark.slow),
        pytest.param(MANIFEST, delete, " has no manifest.json", marks=pytest.mark.slow),
        pytest.param(STATE, flip, " is damaged: its content", marks=pytest.mark.slow),
        pytest.param(STATE, zero, " is damaged: its content", marks=pytest.mark.slow),
        pytest.param(STATE, delete, " cannot be read: No such file or directory", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_named_and_left(
    starter: Starter, undisturbed: Trained, tmp_path: Path, file: str, damage: Damage, said: str
) -> None:
    last = copied(undisturbed, tmp_path) / "step-00000006"
    damage(last / file)
    damaged = contents(last).values()
    job = resume(starter, tmp_path)
    back, aside = [line for line in job.said.splitlines() if line.startswith("warning: ")]
    assert f"checkpoints/step-00000006{'' if said == ' has no manifest.json' else '/' + file}{said}" in back
    assert back.endswith("; going back to the checkpoint before it")
    assert aside == "warning: the checkpoint of step 6 is put aside as step-00000006.aside"
    assert "resumed at step 4\n" in job.said
    assert_as_undisturbed(tmp_path, undisturbed)
    # Not deleted: who knows what may be read of it.
    assert list(contents(last.with_name("step-00000006.aside")).values()) == list(damaged)


def test_two_damaged_ones_and_what_is_lying_about(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    for step in (4, 6):
        zero(checkpoints / f"step-{step:08d}" / SHARD)
    (checkpoints / "latest").write_text("step-99999999\n")
    (checkpoints / "step-00000008").write_text("a file")
    (checkpoints / "step-00000010").mkdir()
    (checkpoints / "step-00000012.partial").mkdir()
    job = resume(starter, tmp_path)
    named = [line.split("checkpoints/")[1][:13] for line in job.said.splitlines() if line.endswith("before it")]
    assert named == ["step-00000010", "step-00000008", "step-00000006", "step-00000004"]
    assert "resumed at step 2\n" in job.said
    assert_as_undisturbed(tmp_path, undisturbed)
    assert (checkpoints / "latest").read_text() == "step-00000006\n"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, zero, empty, delete])
def test_what_the_file_latest_says_decides_nothing(
    starter: Starter, undisturbed: Trained, tmp_path: Path, damage: Damage
) -> None:
    damage(copied(undisturbed, tmp_path) / "latest")
    job = resume(starter, tmp_path)
    assert "resumed at step 6\n" in job.said
    assert "warning" not in job.said
    assert (tmp_path / "runs/run/checkpoints/latest").read_text() == "step-00000006\n"


def test_all_damaged_is_refused_and_nothing_is_touched(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    for step in (2, 4, 6):
        flip(checkpoints / f"step-{step:08d}" / SHARD)
    before = contents(tmp_path / "runs")
    job = starter.start(tmp_path)
    assert job.wait() == [2, 2]
    assert (
        "step-00000002/rank-00001.safetensors is damaged: its content is not what was written, and there is no earlier "
        "checkpoint to go back to; bring the file back, or give --run.name to start a new run\n"
    ) in job.said
    assert job.said.count("warning: ") == 2
    assert "Traceback" not in job.said
    assert contents(tmp_path / "runs") == before


def test_a_named_step_is_gone_on_from(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    later = contents(checkpoints / "step-00000004").values()
    job = resume(starter, tmp_path, **{"checkpoint.resume_from": "2"})
    assert "resumed at step 2\n" in job.said
    assert_as_undisturbed(tmp_path, undisturbed)
    assert list(contents(checkpoints / "step-00000004.aside").values()) == list(later)
    # Of the start after it nothing was said.
    assert "resume_from = 0" in (tmp_path / "runs/run/recipe.toml").read_text()
    assert "resumed at step 6\n" in resume(starter, tmp_path).said


@pytest.mark.slow
def test_a_named_step_that_cannot_be_gone_on_from(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    flip(checkpoints / "step-00000004" / SHARD)
    before = contents(tmp_path / "runs")
    job = starter.start(tmp_path, **{"checkpoint.resume_from": "3"})
    assert job.wait() == [2, 2]
    where = "runs/run/checkpoints"
    assert (
        f"error: checkpoint.resume_from = 3: there is no such checkpoint; {where} has those of steps 2, 4, 6\n"
        in job.said
    )
    job = starter.start(tmp_path, **{"checkpoint.resume_from": "4"})
    assert job.wait() == [2, 2]
    assert (
        f"error: checkpoint.resume_from = 4: {where}/step-00000004/rank-00001.safetensors is damaged: its content is not "
        "what was written; name another step, or none\n"
    ) in job.said
    assert contents(tmp_path / "runs") == before


@pytest.mark.slow
def test_killed_after_it_was_gone_back(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """What was put aside stays so, also when the run does not live to save again."""
    from tests.faults.faulty import Fault

    checkpoints = copied(undisturbed, tmp_path)
    flip(checkpoints / "step-00000006" / MANIFEST)
    job = starter.start(tmp_path, Fault("titanlike.optim.optimizer.AdamW.step", "after", rank=0, step=5))
    assert job.wait_for_a_death()[0] == -9
    assert whole_steps(checkpoints) == [2, 4]
    job = resume(starter, tmp_path)
    assert "resumed at step 4\n" in job.said
    assert "warning" not in job.said
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_sizes_alone_are_looked_at_where_that_is_asked_for(
    starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    """Of what decides how the run goes on, the hash is looked at all the same: it is small."""
    last = copied(undisturbed, tmp_path) / "step-00000006"
    text = (last / STATE).read_text()
    (last / STATE).write_text(text.replace('"seed": 0', '"seed": 7'))
    assert json.loads(text) != json.loads((last / STATE).read_text())
    job = resume(starter, tmp_path, **{"checkpoint.verify": "size"})
    assert "step-00000006/state.json is damaged" in job.said
    assert "resumed at step 4\n" in job.said
    truncate(last / SHARD)
    job = resume(starter, tmp_path, **{"checkpoint.verify": "size"})
    assert "resumed at step 4\n" in job.said
