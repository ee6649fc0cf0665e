"""Full disks: the run continues with a warning, keeps its checkpoints, and stops after several failures."""

import errno
import re
from pathlib import Path
from unittest import mock

from tests.faults.faulty import Fault
from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, assert_as_undisturbed, valid_steps
from titanlike.metrics.records import JSONLWriter

COPY = "titanlike.checkpoint.saver.StagingBuffers.copy"  # the previous save has ended by then
NOT_SAVED = r"warning: saving the checkpoint of step (\d) failed: (.*); training continues\n"


def limited(rank: int, step: int) -> Fault:
    """Limits the file size to less than a shard, from the save of this step on."""
    return Fault(COPY, rank=rank, step=step, do="limit 100000")


def test_a_shard_does_not_fit(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """The next save succeeds, after space was freed."""
    rank = 1
    job = starter.start(tmp_path, limited(rank, 4), Fault(COPY, rank=rank, step=6, do="unlimit"))
    assert job.wait() == [0, 0], job.output
    assert re.findall(NOT_SAVED, job.output) == [("4", f"rank {rank}: [Errno 27] File too large")]
    # Reported by the next step: before that of step 6, whose save waits for it.
    assert job.output.index("warning: ") < job.output.index("step      6/6  saved")
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [2, 6]
    assert_as_undisturbed(tmp_path, undisturbed)


def test_checkpoints_records_and_output_do_not_fit(starter: Starter, undisturbed: Trained, tmp_path: Path) -> None:
    """Checkpoints, records and printed lines do not fit for a while."""
    job = starter.start(
        tmp_path,
        Fault(COPY, "after", rank=0, step=2, do="limit 1000"),
        Fault(COPY, rank=0, step=6, do="unlimit"),
        **{"checkpoint.mode": "sync", "metrics.trackers": '["tensorboard"]'},
    )
    assert job.wait() == [0, 0], job.output
    warning = "warning: runs/run/metrics.jsonl: File too large; records are buffered until there is space\n"
    assert job.output.count(warning) == 1
    assert re.findall(NOT_SAVED, job.output)[0][0] == "2"
    assert valid_steps(tmp_path / "runs/run/checkpoints") == [6]
    assert_as_undisturbed(tmp_path, undisturbed)


def test_records_that_cannot_be_written_until_the_end(tmp_path: Path) -> None:
    writer = JSONLWriter(tmp_path / "metrics.jsonl")
    with mock.patch.object(JSONLWriter, "_flush", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        assert writer.log(1, {}).endswith("No space left on device; records are buffered until there is space")
        assert writer.log(2, {}) == ""  # it has said so
        assert writer.close().endswith("No space left on device; the last 2 records are lost")
