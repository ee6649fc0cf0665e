"""Checkpoints in other locations: on remote stores such as S3, and in directories that are not writable or disappear."""

import signal
from pathlib import Path

import pytest

from tests.faults.faulty import Fault
from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, contents, flip, resume, valid_steps, warnings_of

REMOTE = "titanlike.checkpoint.remote.RemoteStore"


def remote_options(folder: Path, **options: str) -> dict[str, str]:
    """Options for a store that does not rename directories: the code path of s3://."""
    return {"checkpoint.dir": f"file://{folder}/remote", "checkpoint.mode": "sync"} | options


def steps_with_a_manifest(checkpoints: Path) -> list[int]:
    return [int(path.parent.name[-1]) for path in sorted(checkpoints.glob("step-*/manifest.json"))]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(Fault(f"{REMOTE}.create", step=4, argument="manifest.json"), [2], marks=pytest.mark.slow),
        pytest.param(
            Fault("titanlike.checkpoint.store.manifest_hash", "after", step=4), [2], id="while the manifest is written"
        ),
        pytest.param(Fault(f"{REMOTE}.publish", "after", step=4), [2, 4], marks=pytest.mark.slow),
    ],
)
def test_killed_while_saving_to_a_remote_store(
    starter: Starter, undisturbed: Trained, tmp_path: Path, fault: Fault, expected: list[int]
) -> None:
    job = starter.start(tmp_path, fault, **remote_options(tmp_path))
    assert job.wait_for_a_death()[fault.rank] == -9, job.output
    remote = tmp_path / "remote/run"
    assert steps_with_a_manifest(remote) == expected
    job = resume(starter, tmp_path, **remote_options(tmp_path))
    assert f"resumed at step {expected[-1]}\n" in job.output
    assert warnings_of(job.output) == []
    assert_as_undisturbed(tmp_path, undisturbed, remote)
    assert (remote / "latest").read_text() == "step-00000006\n"
    assert not (tmp_path / "runs/run/checkpoints").exists()


def test_remote_checkpoints_are_pruned_and_archived(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    options = remote_options(tmp_path, **{"checkpoint.keep": "2"})
    resume(starter, tmp_path, **options)
    remote = tmp_path / "remote/run"
    assert sorted(path.name for path in remote.iterdir()) == ["latest", "owner.json", "step-00000004", "step-00000006"]
    assert valid_steps(remote) == [4, 6]
    flip(remote / "step-00000006/rank-00001.safetensors")
    job = resume(starter, tmp_path, **options)
    where = f"file://{tmp_path}/remote/run/step-00000006/rank-00001.safetensors"
    assert f"warning: {where} is corrupt: SHA-256 mismatch; falling back to" in job.output
    assert "resumed at step 4\n" in job.output
    assert_as_undisturbed(tmp_path, undisturbed, remote)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("{0}/file", "error: checkpoint.dir: {0}/file/run cannot be used: [Errno 20] Not a directory: "),
        pytest.param("nowhere://bucket", "error: checkpoint.dir = 'nowhere://bucket/run': ", marks=pytest.mark.slow),
    ],
)
def test_a_location_that_is_not_writable(starter: Starter, tmp_path: Path, location: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    job = starter.start(tmp_path, **{"checkpoint.dir": location.format(tmp_path)})
    # On a loaded machine the other rank may fail first, and this one be terminated while it exits.
    assert job.wait_for_a_death()[0] in (2, -signal.SIGTERM), job.output
    assert message.format(tmp_path) in job.output


@pytest.mark.slow
def test_a_directory_that_disappears_during_training(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """Such as an unmounted disk: the run stops, and resumes once the directory is restored."""
    options = {"checkpoint.dir": str(tmp_path / "near"), "checkpoint.mode": "sync", "checkpoint.max_failures": "1"}
    copy = "titanlike.checkpoint.saver.StagingBuffers.copy"
    job = starter.start(tmp_path, Fault(copy, step=4, do="mark four, await gone"), **options)
    job.wait_for(tmp_path / "four.mark")
    (tmp_path / "near/run").rename(tmp_path / "lost")
    (tmp_path / "gone.mark").touch()
    assert job.wait() == [2, 2], job.output
    assert (
        f"error: the save failed: rank 0: {tmp_path}/near/run/owner.json does not exist: the directory was moved or deleted during "
        "training; the last valid checkpoint is of step 2\n"
    ) in job.output
    before = contents(tmp_path / "lost")
    (tmp_path / "lost").rename(tmp_path / "near/run")
    assert {path.replace("lost", "near/run") for path in before} == contents(tmp_path / "near/run").keys()
    assert "resumed at step 2\n" in resume(starter, tmp_path, **options).output
    assert_as_undisturbed(tmp_path, undisturbed, tmp_path / "near/run")
