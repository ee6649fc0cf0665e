"""Warmup-stable-decay: runs that branch from a checkpoint of the stable phase, each with a decay of its own."""

import shutil
from pathlib import Path
from typing import Any

from tests.checkpoints import allowed, assert_identical, refusal, saved_by
from tests.pool import Ranks
from tests.training import tiny, train

STABLE: dict[str, Any] = dict(training=dict(steps=4), schedule=dict(warmup_steps=2, decay="none"))
DECAYS: dict[str, dict[str, Any]] = {
    "linear": dict(training=dict(steps=6), schedule=dict(warmup_steps=2, decay="linear", decay_ratio=1 / 3)),
    "sqrt": dict(training=dict(steps=8), schedule=dict(warmup_steps=2, decay="sqrt", decay_ratio=0.5, min_ratio=0.0)),
}


def test_a_stable_run_branches_into_decays(ranks: Ranks, tmp_path: Path) -> None:
    """Each branch is bit-identical to a run with its schedule from the beginning."""
    options: dict[str, Any] = dict(validation=dict(interval=0))
    stable = train(ranks(1), tiny(tmp_path, "stable", **STABLE, **options))
    for name, sections in DECAYS.items():
        shutil.copytree(tmp_path / "stable", tmp_path / name)
        branch = train(ranks(1), tiny(tmp_path, name, **sections, **options))
        whole = train(ranks(1), tiny(tmp_path, f"whole_{name}", **sections, **options))
        assert len(branch.losses) == sections["training"]["steps"]
        assert_identical(branch, whole)
        assert branch.losses[: len(stable.losses)] == stable.losses


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
    assert (
        "the learning rate of step 1 was 0.5 of the peak and would be 0.3333 (schedule.warmup_steps was 2, now 3;"
        in (
            refusal(
                tmp_path, saved, training=dict(steps=10), schedule=dict(warmup_steps=3, decay="sqrt", decay_ratio=0.1)
            )
        )
    )


def test_a_change_of_the_number_of_steps_moves_a_decay_that_has_begun(tmp_path: Path) -> None:
    cosine = dict(warmup_steps=2)
    saved = saved_by(tiny(tmp_path, "run", training=dict(steps=10), schedule=cosine))
    longer: dict[str, Any] = dict(training=dict(steps=20), schedule=cosine)
    message = refusal(tmp_path, saved, **longer)
    assert (
        "but the learning rate of step 3 was 0.9657 of the peak and would be 0.9932 (training.steps was 10, now 20)"
        in message
    )
    permitted = allowed(tmp_path, saved, **longer, checkpoint=dict(allow_changed=("training.steps",)))
    assert permitted == ["training.steps was 10, now 20"]
    # Another change is reported as well, and the peak is not part of the schedule.
    both = refusal(tmp_path, saved, **longer, optimizer=dict(lr=0.5))
    assert "another recipe: training.steps was 10, now 20; optimizer.lr was 0.01, now 0.5. Restore" in both
    stable = dict(training=dict(steps=20), schedule=dict(warmup_steps=2, decay_ratio=0.35), optimizer=dict(lr=0.5))
    saved = saved_by(tiny(tmp_path, "run", training=dict(steps=10), schedule=dict(warmup_steps=2, decay_ratio=0.7)))
    only = refusal(tmp_path, saved, **stable)
    assert "another recipe: optimizer.lr was 0.01, now 0.5. Restore" in only
