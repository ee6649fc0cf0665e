"""Schedules of the learning rate and the batch size that change at a resume: the run is the one that had the schedule from the
beginning, or is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import allowed, assert_equal_state, assert_identical, refusal, saved_by
from tests.launching import records
from tests.pool import Ranks
from tests.training import tiny, train

STABLE: dict[str, Any] = dict(training=dict(steps=4), schedule=dict(warmup_steps=2, decay="none"))
DECAYS: dict[str, dict[str, Any]] = {
    "linear": dict(training=dict(steps=6), schedule=dict(warmup_steps=2, decay="linear", decay_ratio=1 / 3)),
    "sqrt": dict(training=dict(steps=8), schedule=dict(warmup_steps=2, decay="sqrt", decay_ratio=0.5, min_ratio=0.0)),
}
RAMP: dict[str, Any] = dict(steps=6, global_batch_size=16, batch_ramp=((2, 4), (2, 8)), local_batch_size=2)


def test_a_stable_run_branches_into_decays(ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(validation=dict(interval=0))
    stable = train(ranks(1), tiny(tmp_path, "stable", **STABLE, **options))
    for name, sections in DECAYS.items():
        shutil.copytree(tmp_path / "stable", tmp_path / name)
        branch = train(ranks(1), tiny(tmp_path, name, **sections, **options))
        whole = train(ranks(1), tiny(tmp_path, f"whole_{name}", **sections, **options))
        assert len(branch.losses) == sections["training"]["steps"]
        assert_identical(branch, whole)
        assert branch.losses[: len(stable.losses)] == stable.losses


def test_a_run_stopped_within_a_batch_ramp_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    schedule = dict(schedule=dict(warmup_steps=2, decay="none"))
    whole = train(ranks(1), tiny(tmp_path, "whole", training=RAMP, **schedule))
    counted = [line["tokens"] for line in records(tmp_path / "whole") if "loss" in line]
    assert counted == [32 * size for size in (4, 8, 16, 24, 40, 56)]
    # The final size and later stages may still change after step 3.
    other = RAMP | dict(steps=3, batch_ramp=((2, 4),), global_batch_size=8)
    train(ranks(1), tiny(tmp_path, "parts", training=other, **schedule))
    metadata = json.loads((tmp_path / "parts/checkpoints/step-00000003/state.json").read_text())
    assert metadata["tokens"] == 32 * (4 + 4 + 8)
    parts = train(ranks(1), tiny(tmp_path, "parts", training=RAMP, **schedule))
    assert_equal_state(parts.state, whole.state)
    assert parts.losses == whole.losses


@pytest.mark.parametrize("source", ["synthetic", "stream"])
def test_the_batches_of_steps_taken_may_not_change(tmp_path: Path, source: str) -> None:
    def sections(*ramp: Any) -> dict[str, Any]:
        return dict(training=RAMP | dict(batch_ramp=ramp), data=dict(source=source))

    saved = saved_by(tiny(tmp_path, "run", **sections(*RAMP["batch_ramp"])))  # of step 3
    assert allowed(tmp_path, saved, **sections((2, 4), (9, 8))) == []
    message = refusal(tmp_path, saved, **sections((3, 4), (2, 8)))
    assert "training.batch_ramp was [[2, 4], [2, 8]], now [[3, 4], [2, 8]]. Restore" in message
    assert "training.batch_ramp was [[2, 4], [2, 8]], now []" in refusal(tmp_path, saved, **sections())
    smaller = sections((2, 4), (1, 8), (1, 2))
    if source == "synthetic":
        assert allowed(tmp_path, saved, **smaller) == []
    else:  # the readers of a stream are as many as divide every size
        assert "training.batch_ramp was" in refusal(tmp_path, saved, **smaller)


def test_a_change_of_the_learning_rate_of_a_step_taken_is_refused(tmp_path: Path) -> None:
    saved = saved_by(tiny(tmp_path, "run", training=dict(steps=10), schedule=dict(warmup_steps=2, decay="none")))
    decay = dict(training=dict(steps=4), schedule=dict(warmup_steps=2, decay="linear", decay_ratio=0.25))
    assert allowed(tmp_path, saved, **decay) == []  # of step 4, the first to come
    assert refusal(tmp_path, saved, **decay | dict(training=dict(steps=3))) == (
        f"{tmp_path}/run holds a run at step 3, but the learning rate of step 3 was 1 of the peak and would be 0.1 "
        '(training.steps was 10, now 3; schedule.decay was "none", now "linear"); restore these values, resume from an earlier '
        "step with --checkpoint.resume_from, or give --run.name to start a new run; to resume with the changes: "
        """--checkpoint.allow_changed='["training.steps", "schedule.decay"]'"""
    )


def test_a_change_of_the_number_of_steps_moves_a_decay_that_has_begun(tmp_path: Path) -> None:
    cosine = dict(warmup_steps=2)
    saved = saved_by(tiny(tmp_path, "run", training=dict(steps=10), schedule=cosine))
    longer: dict[str, Any] = dict(training=dict(steps=20), schedule=cosine)
    message = refusal(tmp_path, saved, **longer)
    assert "step 3 was 0.9657 of the peak and would be 0.9932 (training.steps was 10, now 20)" in message
    permitted = allowed(tmp_path, saved, **longer, checkpoint=dict(allow_changed=("training.steps",)))
    assert permitted == ["training.steps was 10, now 20"]
    # Another change is reported as well, and the peak is not part of the schedule.
    both = refusal(tmp_path, saved, **longer, optimizer=dict(lr=0.5))
    assert "another recipe: training.steps was 10, now 20; optimizer.lr was 0.01, now 0.5. Restore" in both
