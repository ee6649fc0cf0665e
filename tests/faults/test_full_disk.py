"""Full disks: the run continues with a warning, keeps its checkpoints, and stops after several failures."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faulty import Fault
from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, contents, resume, valid_steps
from tests.launching import losses

COPY = "titanlike.checkpoint.saver.StagingBuffers.copy"  # the previous save has ended by then
NOT_SAVED = r"warning: saving the checkpoint of step (\d) failed: (.*); training continues\n"


def limited(rank: int, step: int) -> Fault:
    """Limits the file size to less than a shard, from the save of this step on."""
    return Fault(COPY, rank=rank, step=step, do="limit 100000")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_shard_does_not_fit(starter: Starter, undisturbed: Trained, tmp_path: Path, rank: int) -> None:
    """The next save succeeds, after space was freed."""
    job = starter.start(tmp_path, limited(rank, 4), Fault(COPY, rank=rank, step=6, do="unlimit"))
    assert job.wait() == [0, 0], job.output
    assert re.findall(NOT_SAVED, job.output) == [("4", f"rank {rank}: [Errno 27] File too large")]
    # Reported by the next step: before that of step 6, whose save waits for it.
    assert job.output.index("warning: ") < job.output.index("step      6/6  saved")
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2, 6]
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_the_run_stops_after_max_failures(starter: Starter, undisturbed: Trained, tmp_path: Path, mode: str) -> None:
    options = {"checkpoint.mode": mode, "checkpoint.interval": "1", "checkpoint.max_failures": "2"}
    job = starter.start(tmp_path, limited(1, 3), **options)
    assert job.wait() == [2, 2], job.output
    warnings = re.findall(NOT_SAVED, job.output)
    assert warnings[0] == ("3", "rank 1: [Errno 27] File too large")
    error = (
        "error: 2 consecutive saves failed: rank 1: [Errno 27] File too large; the last valid checkpoint is of step 2\n"
    )
    assert error in job.output
    assert "Traceback" not in job.output
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [1, 2]
    assert 4 <= max(losses(tmp_path / "runs/run")) <= 6  # it stops soon
    assert "resumed at step 2\n" in resume(starter, tmp_path).output
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_free_space_is_checked_before_writing(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    job = starter.start(tmp_path, Fault(COPY, rank=0, step=4, do="full"), **{"checkpoint.max_failures": "1"})
    assert job.wait() == [2, 2], job.output
    where = "runs/run/checkpoints"
    assert re.search(
        rf"error: the save failed: rank 0: {where} has 1,000 bytes free, but a checkpoint takes \d\d\d,\d\d\d; the last valid "
        r"checkpoint is of step 2\n",
        job.output,
    )
    assert [path.name for path in sorted((tmp_path / where).iterdir())] == ["latest", "step-00000002"]
    resume(starter, tmp_path)
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.parametrize("trackers", ["[]", pytest.param('["tensorboard"]', marks=pytest.mark.slow)])
def test_checkpoints_records_and_output_do_not_fit(
    starter: Starter, undisturbed: Trained, tmp_path: Path, trackers: str
) -> None:
    """Checkpoints, records and printed lines do not fit for a while."""
    job = starter.start(
        tmp_path,
        Fault(COPY, "after", rank=0, step=2, do="limit 1000"),
        Fault(COPY, rank=0, step=6, do="unlimit"),
        **{"checkpoint.mode": "sync", "metrics.trackers": trackers},
    )
    assert job.wait() == [0, 0], job.output
    warning = "warning: runs/run/metrics.jsonl: File too large; records are buffered until there is space\n"
    assert job.output.count(warning) == 1
    assert re.findall(NOT_SAVED, job.output)[0][0] == "2"
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [6]
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_records_that_cannot_be_written_until_the_end(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """The records are lost, and recreated by a resume from an earlier step; the checkpoints are kept."""
    faults = [Fault("titanlike.metrics.records.JSONLWriter._flush", step=step, do="refuse") for step in (5, 6)]
    job = starter.start(tmp_path, *faults)
    assert job.wait() == [0, 0], job.output
    assert (
        "warning: runs/run/metrics.jsonl: No space left on device; records are buffered until there is space\n"
        in job.output
    )
    assert re.search(
        r"warning: runs/run/metrics.jsonl: No space left on device; the last \d records are lost\n", job.output
    )
    assert "resumed at step 4\n" in resume(starter, tmp_path, **{"checkpoint.resume_from": "4"}).output
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system for the run, with space for two or three checkpoints."""
    directory = tmp_path / "runs"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(disk: Path) -> None:
    """Uses all free space."""
    with (disk / "fill").open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(bytes(512))


@pytest.mark.slow
def test_a_disk_fills_up_and_is_freed(starter: Starter, undisturbed: Trained, tmp_path: Path, small_disk: Path) -> None:
    job = starter.start(
        tmp_path,
        Fault("titanlike.optim.schedule.set_learning_rate", rank=0, step=3, do="mark three, await filled"),
        Fault("titanlike.optim.schedule.set_learning_rate", rank=0, step=6, do="mark six, await emptied"),
        **{"checkpoint.mode": "sync"},
    )
    job.wait_for(tmp_path / "three.mark")
    fill(small_disk)
    (tmp_path / "filled.mark").touch()
    job.wait_for(tmp_path / "six.mark")
    assert re.findall(NOT_SAVED, job.output)[0][0] == "4"
    assert valid_steps(small_disk / "run/checkpoints") == [2]
    (small_disk / "fill").unlink()
    (tmp_path / "emptied.mark").touch()
    assert job.wait() == [0, 0], job.output
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_start_that_cannot_write_its_first_file_changes_no_files(
    starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    constant = {"schedule.decay": "none"}  # so that a resume may raise the number of steps
    resume(starter, tmp_path, **constant | {"checkpoint.keep": "1", "training.steps": "4"})
    before = lasting_files(tmp_path)
    job = starter.start(tmp_path, Fault("titanlike.utils.atomic_write.write_all", do="refuse"), **constant)
    assert job.wait_for_a_death()[0] == 2, job.output
    message = (
        "error: cannot write to runs/run: [Errno 28] No space left on device; fix this, or choose another run.dir\n"
    )
    assert message in job.output
    assert lasting_files(tmp_path) == before


def lasting_files(folder: Path) -> dict[str, bytes]:
    """Returns the content of all files of a run but its lock."""
    return {path: content for path, content in contents(folder / "runs/run").items() if not path.endswith("/lock")}
