"""A sweep of real runs that is killed twice has the same results as one that is not."""

from pathlib import Path

import pytest

from benchmarks.sweep import compare
from tests.sweeps import RUN, SWEEP
from titanlike.config.load import dump


@pytest.mark.every  # tests/unit/test_sweep.py kills a sweep at many points
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
