"""The batch-size ramp in training: parity with one process, resume within the ramp, and which changes a resume permits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import allowed, assert_equal_state, refusal, saved_by
from tests.launching import records
from tests.parity import tiers
from tests.pool import Ranks
from tests.training import assert_same, tiny, train, world_size
from titanlike.config.sections import Parallelism

RAMP = ((2, 4), (2, 8))
SIZES = [4, 4, 8, 8, 16, 16]
TRAINING: dict[str, Any] = dict(steps=6, global_batch_size=16, batch_ramp=RAMP, local_batch_size=2)

CASES: dict[str, dict[str, Any]] = {
    "FSDP": dict(shard=2),
    "PP": dict(pipeline=2, pipeline_schedule="1f1b"),
    "HSDP": dict(replicate=2, shard=1),
    "PP x FSDP": dict(pipeline=2, shard=2, pipeline_schedule="gpipe"),
}


@pytest.mark.parametrize("case", tiers(CASES, ["PP"]))
def test_layout_matches_one_process(ranks: Ranks, tmp_path: Path, case: str) -> None:
    size = {"training": TRAINING | ({"local_batch_size": 1} if "x" in case else {})}
    expected = train(ranks(1), tiny(tmp_path, "one", **size))
    several = tiny(tmp_path, "several", parallelism=Parallelism(**({"shard": 1} | CASES[case])), **size)
    assert_same(train(ranks(world_size(several)), several), expected)


def test_a_run_stopped_within_the_ramp_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    whole = train(ranks(1), tiny(tmp_path, "whole", training=TRAINING))
    counted = [line["tokens"] for line in records(tmp_path / "whole") if "loss" in line]
    assert counted == [32 * sum(SIZES[:step]) for step in range(1, 7)]
    # The final size and later stages may still change after step 3.
    other = TRAINING | dict(steps=3, batch_ramp=((2, 4),), global_batch_size=8)
    schedule = dict(schedule=dict(warmup_steps=2, decay="none"))
    train(ranks(1), tiny(tmp_path, "parts", training=other, **schedule))
    metadata = json.loads((tmp_path / "parts/checkpoints/step-00000003/state.json").read_text())
    assert metadata["tokens"] == 32 * (4 + 4 + 8)
    parts = train(ranks(1), tiny(tmp_path, "parts", training=TRAINING, **schedule))
    shutil.rmtree(tmp_path / "whole")
    whole = train(ranks(1), tiny(tmp_path, "whole", training=TRAINING, **schedule))
    assert_equal_state(parts.state, whole.state)
    assert parts.losses == whole.losses


def test_the_batches_of_steps_taken_may_not_change(tmp_path: Path) -> None:
    def sections(ramp: Any, size: int = 16, source: str = "synthetic") -> dict[str, Any]:
        return dict(training=TRAINING | dict(batch_ramp=ramp, global_batch_size=size), data=dict(source=source))

    saved = saved_by(tiny(tmp_path, "run", **sections(RAMP)))  # of step 3
    assert saved.step == 3
    for permitted in (((2, 4), (9, 8)), ((1, 4), (1, 4), (1, 8)), ((2, 4), (1, 8), (1, 2))):
        assert allowed(tmp_path, saved, **sections(permitted)) == []
    assert allowed(tmp_path, saved, **sections(((2, 4),), size=8)) == []
    message = refusal(tmp_path, saved, **sections(((3, 4), (2, 8))))
    assert "training.batch_ramp was [[2, 4], [2, 8]], now [[3, 4], [2, 8]]. Restore" in message
    assert "training.batch_ramp was [[2, 4], [2, 8]], now []" in refusal(tmp_path, saved, **sections(()))
    # The readers of a stream are as many as divide every size.
    saved = saved_by(tiny(tmp_path, "run", **sections(RAMP, source="stream")))
    assert allowed(tmp_path, saved, **sections(((2, 4), (9, 8)), source="stream")) == []
    assert "training.batch_ramp was" in refusal(tmp_path, saved, **sections(((2, 4), (1, 8), (1, 2)), source="stream"))
