"""A sweep of real runs that is killed twice has the same results as one that is not."""

from pathlib import Path

import pytest

from benchmarks.sweep import RECIPE, compare
from titanlike.config.load import dump

RUN = {
    "extends": str(RECIPE),
    "model": {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 96},
    "data": {"source": "synthetic"},
    "training": {"steps": 6, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 2},
    "schedule": {"warmup_steps": 2},
    "validation": {"interval": 2},
    "checkpoint": {"interval": 2},
    "sample": {"tokens": 0},
    "metrics": {"interval": 1, "trackers": []},
}
SWEEP = {
    "name": "killed",
    "recipe": "recipe.toml",
    "trials": 12,
    "startup_trials": 4,
    "pruning": {"startup_trials": 2},
    "search": {
        "optimizer.lr": {"low": 1e-3, "high": 1e-1, "log": True},
        "schedule.warmup_steps": {"low": 1, "high": 5},
    },
}


@pytest.mark.every  # tests/unit/test_sweep.py kills a sweep at every fifth point
def test_a_sweep_that_is_killed_twice_ends_with_the_same_table(tmp_path: Path) -> None:
    for name, values in (("recipe", RUN), ("sweep", SWEEP)):
        (tmp_path / f"{name}.toml").write_text(dump(values))
    results = compare(tmp_path / "sweep.toml", [2, 7])
    assert results["killed"] == results["whole"]
    trials = results["killed"]["trials"]
    pruned = [trial for trial in trials if trial["state"] == "pruned"]
    assert len(trials) == 12 and 0 < len(pruned) < 10
    assert all("complete trials at step" in trial["reason"] and trial["step"] < 6 for trial in pruned)
    assert all(trial["step"] == 6 for trial in trials if trial["state"] == "complete")
