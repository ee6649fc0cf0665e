"""Corrupt checkpoints: the run names them, and resumes from the previous one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.starting import Starter
from tests.faults.undisturbed import (
    Trained,
    assert_as_undisturbed,
    contents,
    copied,
    flip,
    resume,
    valid_steps,
    warnings_of,
)

Damage = Callable[[Path], None]
SHARD, MANIFEST, STATE = "rank-00001.safetensors", "manifest.json", "state.json"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    """As a file system may leave a file after a power failure."""
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    """Replaces a file by that of another step, which is valid in itself."""
    shutil.copy(path.parent.with_name("step-00000004") / path.name, path)


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        (SHARD, flip, " is corrupt: SHA-256 mismatch"),
        pytest.param(SHARD, swap, " is corrupt: SHA-256 mismatch", marks=pytest.mark.slow),
        pytest.param(SHARD, delete, " cannot be read: No such file or directory", marks=pytest.mark.slow),
        (MANIFEST, flip, " is corrupt: "),
        pytest.param(MANIFEST, swap, " is corrupt: it belongs to step 4", marks=pytest.mark.slow),
        pytest.param(MANIFEST, delete, " has no manifest.json", marks=pytest.mark.slow),
        pytest.param(STATE, delete, " cannot be read: No such file or directory", marks=pytest.mark.slow),
    ],
)
def test_a_corrupt_checkpoint_is_named_and_archived(
    starter: Starter, undisturbed: Trained, tmp_path: Path, file: str, damage: Damage, problem: str
) -> None:
    last = copied(undisturbed, tmp_path) / "step-00000006"
    damage(last / file)
    damaged = contents(last).values()
    job = resume(starter, tmp_path)
    fallback, archived = [line for line in job.output.splitlines() if line.startswith("warning: ")]
    assert f"checkpoints/step-00000006{'' if problem == ' has no manifest.json' else '/' + file}{problem}" in fallback
    assert fallback.endswith("; falling back to the previous checkpoint")
    assert archived == "warning: archived the checkpoint of step 6 as step-00000006.archived"
    assert "resumed at step 4\n" in job.output
    assert_as_undisturbed(tmp_path, undisturbed)
    # Not deleted: some of it may be recoverable.
    assert list(contents(last.with_name("step-00000006.archived")).values()) == list(damaged)


def test_several_corrupt_checkpoints_and_unrelated_files(
    starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    for step in (4, 6):
        zero(checkpoints / f"step-{step:08d}" / SHARD)
    (checkpoints / "latest").write_text("step-99999999\n")
    (checkpoints / "step-00000008").write_text("a file")
    (checkpoints / "step-00000010").mkdir()
    (checkpoints / "step-00000012.partial").mkdir()
    job = resume(starter, tmp_path)
    named = [
        line.split("checkpoints/")[1][:13] for line in job.output.splitlines() if line.endswith("previous checkpoint")
    ]
    assert named == ["step-00000010", "step-00000008", "step-00000006", "step-00000004"]
    assert "resumed at step 2\n" in job.output
    assert_as_undisturbed(tmp_path, undisturbed)
    assert (checkpoints / "latest").read_text() == "step-00000006\n"


@pytest.mark.slow
@pytest.mark.parametrize("damage", [zero, delete])
def test_the_file_latest_is_not_read(starter: Starter, undisturbed: Trained, tmp_path: Path, damage: Damage) -> None:
    damage(copied(undisturbed, tmp_path) / "latest")
    job = resume(starter, tmp_path)
    assert "resumed at step 6\n" in job.output
    assert warnings_of(job.output) == []
    assert (tmp_path / "runs/run/checkpoints/latest").read_text() == "step-00000006\n"


def test_a_run_without_a_valid_checkpoint_is_refused_and_unchanged(
    starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    for step in (2, 4, 6):
        flip(checkpoints / f"step-{step:08d}" / SHARD)
    before = contents(tmp_path / "runs")
    job = starter.start(tmp_path)
    assert job.wait() == [2, 2]
    assert (
        "step-00000002/rank-00001.safetensors is corrupt: SHA-256 mismatch, and there is no earlier checkpoint; restore the file, "
        "or set --run.name to start a new run\n"
    ) in job.output
    assert job.output.count("warning: ") == 2
    assert "Traceback" not in job.output
    assert contents(tmp_path / "runs") == before


def test_resume_from_a_chosen_step(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    later = contents(checkpoints / "step-00000004").values()
    job = resume(starter, tmp_path, **{"checkpoint.resume_from": "2"})
    assert "resumed at step 2\n" in job.output
    assert_as_undisturbed(tmp_path, undisturbed)
    assert list(contents(checkpoints / "step-00000004.archived").values()) == list(later)
    # The key applies to one start only.
    assert "resume_from = 0" in (tmp_path / "runs/run/recipe.toml").read_text()
    assert "resumed at step 6\n" in resume(starter, tmp_path).output


@pytest.mark.slow
def test_resume_from_a_missing_or_corrupt_step_is_refused(
    starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    checkpoints = copied(undisturbed, tmp_path)
    flip(checkpoints / "step-00000004" / SHARD)
    before = contents(tmp_path / "runs")
    job = starter.start(tmp_path, **{"checkpoint.resume_from": "3"})
    assert job.wait() == [2, 2]
    where = "runs/run/checkpoints"
    assert f"error: checkpoint.resume_from = 3: no such checkpoint; {where} contains steps 2, 4, 6\n" in job.output
    job = starter.start(tmp_path, **{"checkpoint.resume_from": "4"})
    assert job.wait() == [2, 2]
    assert (
        f"error: checkpoint.resume_from = 4: {where}/step-00000004/rank-00001.safetensors is corrupt: SHA-256 "
        "mismatch; choose another step, or omit the key\n"
    ) in job.output
    assert contents(tmp_path / "runs") == before


@pytest.mark.slow
def test_killed_after_a_fallback(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """An archived checkpoint stays archived, even if the run dies before its next save."""
    from tests.faults.faulty import Fault

    checkpoints = copied(undisturbed, tmp_path)
    flip(checkpoints / "step-00000006" / MANIFEST)
    job = starter.start(tmp_path, Fault("titanlike.optim.optimizer.AdamW.step", "after", rank=0, step=5))
    assert job.wait_for_a_death()[0] == -9
    assert valid_steps(checkpoints) == [2, 4]
    job = resume(starter, tmp_path)
    assert "resumed at step 4\n" in job.output
    assert warnings_of(job.output) == []
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_verification_of_sizes_only(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """The hash of the metadata is verified all the same."""
    last = copied(undisturbed, tmp_path) / "step-00000006"
    text = (last / STATE).read_text()
    (last / STATE).write_text(text.replace('"seed": 0', '"seed": 7'))
    assert json.loads(text) != json.loads((last / STATE).read_text())
    job = resume(starter, tmp_path, **{"checkpoint.verify": "size"})
    assert "step-00000006/state.json is corrupt" in job.output
    assert "resumed at step 4\n" in job.output
    truncate(last / SHARD)
    job = resume(starter, tmp_path, **{"checkpoint.verify": "size"})
    assert "resumed at step 4\n" in job.output
