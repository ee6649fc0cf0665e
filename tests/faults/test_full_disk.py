"""No room: the run goes on and says so, the checkpoints that there are stay, and it stops when that has gone on for too long."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faulty import Fault
from tests.faults.starting import Starter
from tests.faults.test_damage import contents
from tests.faults.undisturbed import Trained, assert_as_undisturbed, resume, whole_steps
from tests.launching import losses

TAKE = "titanlike.checkpoint.saver.Stage.take"  # the save before is over by then
NOT_SAVED = r"warning: the checkpoint of step (\d) was not saved: (.*); training goes on\n"


def limited(rank: int, step: int) -> Fault:
    """From the save of this step on a file may have less than a shard has."""
    return Fault(TAKE, rank=rank, step=step, do="limit 100000")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_shard_that_finds_no_room(starter: Starter, undisturbed: Trained, tmp_path: Path, rank: int) -> None:
    """Then there is some again, and the next save is as any other."""
    job = starter.start(tmp_path, limited(rank, 4), Fault(TAKE, rank=rank, step=6, do="unlimit"))
    assert job.wait() == [0, 0], job.said
    assert re.findall(NOT_SAVED, job.said) == [("4", f"rank {rank}: [Errno 27] File too large")]
    # Told within a step of its end: before step 6 is over, whose save waits for it.
    assert job.said.index("warning: ") < job.said.index("step      6/6  saved")
    assert whole_steps(tmp_path / "runs/run/checkpoints") == [2, 6]
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_it_stops_when_no_save_succeeds(starter: Starter, undisturbed: Trained, tmp_path: Path, mode: str) -> None:
    options = {"checkpoint.mode": mode, "checkpoint.interval": "1", "checkpoint.max_failures": "2"}
    job = starter.start(tmp_path, limited(1, 3), **options)
    assert job.wait() == [2, 2], job.said
    told = re.findall(NOT_SAVED, job.said)
    assert told[0] == ("3", "rank 1: [Errno 27] File too large")
    error = (
        "error: 2 saves in a row have failed: rank 1: [Errno 27] File too large; the last whole checkpoint is that of "
        "step 2\n"
    )
    assert error in job.said
    assert "Traceback" not in job.said
    assert whole_steps(tmp_path / "runs/run/checkpoints") == [1, 2]
    assert 4 <= max(losses(tmp_path / "runs/run")) <= 6  # it does not go on for long
    assert "resumed at step 2\n" in resume(starter, tmp_path).said
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_the_last_save_fails(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    job = starter.start(tmp_path, limited(0, 6))
    assert job.wait() == [2, 2], job.said
    assert (
        "error: the save failed: rank 0: [Errno 27] File too large; the last whole checkpoint is that of step 4\n"
        in job.said
    )
    assert "resumed at step 4\n" in resume(starter, tmp_path).said
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_disk_that_is_seen_to_be_full_before_a_byte_is_written(
    starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    job = starter.start(tmp_path, Fault(TAKE, rank=0, step=4, do="full"), **{"checkpoint.max_failures": "1"})
    assert job.wait() == [2, 2], job.said
    where = "runs/run/checkpoints"
    assert re.search(
        rf"error: the save failed: {where} has 1,000 bytes left, and a checkpoint takes \d\d\d,\d\d\d; the last whole "
        r"checkpoint is that of step 2\n",
        job.said,
    )
    assert [path.name for path in sorted((tmp_path / where).iterdir())] == ["latest", "step-00000002"]
    resume(starter, tmp_path)
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.parametrize("tensorboard", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_no_room_for_anything(starter: Starter, undisturbed: Trained, tmp_path: Path, tensorboard: str) -> None:
    """Neither for shards nor for records, nor for what is printed, for a while."""
    job = starter.start(
        tmp_path,
        Fault(TAKE, "after", rank=0, step=2, do="limit 1000"),
        Fault(TAKE, rank=0, step=6, do="unlimit"),
        **{"checkpoint.mode": "sync", "metrics.tensorboard": tensorboard},
    )
    assert job.wait() == [0, 0], job.said
    told = "warning: runs/run/metrics.jsonl: File too large; its records wait for room\n"
    assert job.said.count(told) == 1
    assert re.findall(NOT_SAVED, job.said)[0][0] == "2"
    assert whole_steps(tmp_path / "runs/run/checkpoints") == [6]
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_records_that_find_no_room_at_all(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """They are lost, and made again when the run is taken up from before; the checkpoints are not."""
    nowhere = [Fault("titanlike.metrics.trackers.Records._write", step=step, do="refuse") for step in (5, 6)]
    job = starter.start(tmp_path, *nowhere)
    assert job.wait() == [0, 0], job.said
    assert "warning: runs/run/metrics.jsonl: No space left on device; its records wait for room\n" in job.said
    assert re.search(
        r"warning: runs/run/metrics.jsonl: No space left on device; its last \d records are lost\n", job.said
    )
    assert "resumed at step 4\n" in resume(starter, tmp_path, **{"checkpoint.resume_from": "4"}).said
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system on which the run lies, with room for two checkpoints or three."""
    place = tmp_path / "runs"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small disk: this user may not mount one")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    """Take all that is left."""
    with (disk / "fill").open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(bytes(512))


@pytest.mark.slow
def test_a_disk_that_fills_up_and_empties(
    starter: Starter, undisturbed: Trained, tmp_path: Path, small_disk: Path
) -> None:
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
    assert re.findall(NOT_SAVED, job.said)[0][0] == "4"
    assert whole_steps(small_disk / "run/checkpoints") == [2]
    (small_disk / "fill").unlink()
    (tmp_path / "emptied.mark").touch()
    assert job.wait() == [0, 0], job.said
    assert_as_undisturbed(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_start_on_a_full_disk_changes_nothing(
    starter: Starter, undisturbed: Trained, tmp_path: Path, small_disk: Path
) -> None:
    resume(starter, tmp_path, **{"checkpoint.keep": "1", "training.steps": "4"})
    fill(small_disk)
    before = kept(tmp_path)
    job = starter.start(tmp_path)
    assert job.wait_for_a_death()[0] == 2, job.said
    assert "No space left on device; choose another run.dir\n" in job.said
    assert kept(tmp_path) == before


@pytest.mark.slow
def test_a_start_whose_first_file_finds_no_room_changes_nothing(
    starter: Starter, undisturbed: Trained, tmp_path: Path
) -> None:
    resume(starter, tmp_path, **{"checkpoint.keep": "1", "training.steps": "4"})
    before = kept(tmp_path)
    job = starter.start(tmp_path, Fault("titanlike.utils.atomic_io.write_all", do="refuse"))
    assert job.wait_for_a_death()[0] == 2, job.said
    told = "error: cannot write to runs/run: [Errno 28] No space left on device; fix this, or choose another run.dir\n"
    assert told in job.said
    assert kept(tmp_path) == before


def kept(folder: Path) -> dict[str, bytes]:
    """All that lasts of a run's folder."""
    return {path: content for path, content in contents(folder / "runs/run").items() if not path.endswith("/lock")}
