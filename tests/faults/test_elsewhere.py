"""Checkpoints in another place: at an address, as on S3, and in places that cannot be written to."""

import signal
from pathlib import Path

import pytest

from tests.faults.faulty import WRITING, Fault
from tests.faults.starting import Starter
from tests.faults.test_damage import contents, flip
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, whole_steps

REMOTE = "titanlike.checkpoint.store.Remote"


def address(folder: Path, **options: str) -> dict[str, str]:
    """A store without renames: the same code as for s3://."""
    return {"checkpoint.dir": f"file://{folder}/far", "checkpoint.mode": "sync"} | options


def steps_with_a_manifest(checkpoints: Path) -> list[int]:
    return [int(path.parent.name[-1]) for path in sorted(checkpoints.glob("step-*/manifest.json"))]


@pytest.mark.parametrize(
    ("fault", "there"),
    [
        pytest.param(Fault(WRITING, "inside", 1, 4), [2], marks=pytest.mark.slow),
        pytest.param(Fault(f"{REMOTE}.create", step=4, given="manifest.json"), [2], marks=pytest.mark.slow),
        pytest.param(Fault("titanlike.checkpoint.store._own_hash", "after", step=4), [2], id="the manifest is begun"),
        pytest.param(Fault(f"{REMOTE}.commit", "after", step=4), [2, 4], marks=pytest.mark.slow),
    ],
)
def test_killed_while_it_saves_to_an_address(
    starter: Starter, undisturbed: Trained, tmp_path: Path, fault: Fault, there: list[int]
) -> None:
    job = starter.start(tmp_path, fault, **address(tmp_path))
    assert job.wait_for_a_death()[fault.rank] == -9, job.said
    far = tmp_path / "far/run"
    assert steps_with_a_manifest(far) == there
    job = resume(starter, tmp_path, **address(tmp_path))
    assert f"resumed at step {there[-1]}\n" in job.said
    assert "warning" not in job.said
    assert_as_undisturbed(tmp_path, undisturbed, far)
    assert (far / "latest").read_text() == "step-00000006\n"
    assert not (tmp_path / "runs/run/checkpoints").exists()


def test_the_old_ones_go_and_a_damaged_one_is_left(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    options = address(tmp_path, **{"checkpoint.keep": "2"})
    resume(starter, tmp_path, **options)
    far = tmp_path / "far/run"
    assert sorted(path.name for path in far.iterdir()) == ["latest", "step-00000004", "step-00000006"]
    assert whole_steps(far) == [4, 6]
    flip(far / "step-00000006/rank-00001.safetensors")
    job = resume(starter, tmp_path, **options)
    where = f"file://{tmp_path}/far/run/step-00000006/rank-00001.safetensors"
    assert f"warning: {where} is damaged: its content is not what was written; going back to" in job.said
    assert "resumed at step 4\n" in job.said
    assert_as_undisturbed(tmp_path, undisturbed, far)


@pytest.mark.slow
def test_killed_while_an_old_one_goes_from_an_address(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    options = address(tmp_path, **{"checkpoint.keep": "1"})
    job = starter.start(tmp_path, Fault("os.remove", "after", step=4), **options)
    assert job.wait_for_a_death()[0] == -9, job.said
    assert steps_with_a_manifest(tmp_path / "far/run") == [4]
    resume(starter, tmp_path, **options)
    assert_as_undisturbed(tmp_path, undisturbed, tmp_path / "far/run")
    assert sorted(path.name for path in (tmp_path / "far/run").iterdir()) == ["latest", "step-00000006"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("{0}/file", "error: checkpoint.dir = '{0}/file': [Errno 20] Not a directory: '{0}/file/run'; choose another"),
        pytest.param("/proc/titanlike", "error: checkpoint.dir = '/proc/titanlike': ", marks=pytest.mark.slow),
        pytest.param("nowhere://bucket", "error: checkpoint.dir = 'nowhere://bucket/run': ", marks=pytest.mark.slow),
    ],
)
def test_a_place_that_cannot_be_written_to(starter: Starter, tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    job = starter.start(tmp_path, **{"checkpoint.dir": place.format(tmp_path)})
    # On a busy machine the other rank may miss it first, and it is ended on its way out.
    assert job.wait_for_a_death()[0] in (2, -signal.SIGTERM), job.said
    assert said.format(tmp_path) in job.said


@pytest.mark.slow
def test_a_folder_that_goes_away_while_it_trains(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """A disk that is lost, say: the run stops in the end, and what is brought back is gone on from."""
    options = {"checkpoint.dir": str(tmp_path / "near"), "checkpoint.mode": "sync", "checkpoint.max_failures": "1"}
    take = "titanlike.checkpoint.saver.Stage.take"
    job = starter.start(tmp_path, Fault(take, step=4, do="mark four, await gone"), **options)
    job.wait_for(tmp_path / "four.mark")
    (tmp_path / "near/run").rename(tmp_path / "lost")
    (tmp_path / "gone.mark").touch()
    assert job.wait() == [2, 2], job.said
    assert (
        f"error: the save failed: {tmp_path}/near/run is gone: the run's folder was moved or deleted while it trained; the "
        "last whole checkpoint is that of step 2\n"
    ) in job.said
    before = contents(tmp_path / "lost")
    (tmp_path / "lost").rename(tmp_path / "near/run")
    assert {path.replace("lost", "near/run") for path in before} == contents(tmp_path / "near/run").keys()
    assert "resumed at step 2\n" in resume(starter, tmp_path, **options).said
    assert_as_undisturbed(tmp_path, undisturbed, tmp_path / "near/run")
