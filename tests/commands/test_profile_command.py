"""`titanlike profile`, as a user runs it."""

import json
from pathlib import Path

import pytest

from tests import launching
from tests.forkserver import ROOT

SMALL = [
    f"--{key}={value}" for key, value in launching.SMALL.items() if not key.startswith(("metrics", "training.steps"))
]


def profile(folder: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    done = launching.python(folder, "-m", "titanlike.tools.cli.main", "profile", *words, variables=variables)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_profile_of_two_ranks_beside_a_plan(tmp_path: Path) -> None:
    recipe = str(ROOT / "train_configs/debug.toml")
    words = ["--ranks", "0,1", "--hardware", "h100", "--out", "found", "--json"]
    code, output, errors = profile(tmp_path, recipe, *SMALL, *words, NPROC="2", PYTHONPATH=str(ROOT))
    assert code == 0, errors
    found = json.loads(output)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        parts = rank["step_parts_seconds"]
        assert sum(parts.values()) == pytest.approx(rank["step_seconds"])
        assert {"matmul", "attention", "elementwise", "optimizer", "exposed shard", "host gaps"} <= set(parts)
        assert rank["num_steps"] == 3
    assert found["plan"]["step_parts_seconds"]["matmul"] > 0
    # The traces are kept, and printed again without a run.
    code, output, errors = profile(tmp_path, "found", "--hardware", "h100", PYTHONPATH=str(ROOT))
    assert code == 0, errors
    for text in ("exposed shard", "rank 0", "rank 1", "plan", "resident at the peak", "ui.perfetto.dev"):
        assert text in output
    code, _, errors = profile(tmp_path, recipe, *SMALL, "--out", "found", PYTHONPATH=str(ROOT))
    assert (code, errors) == (2, "error: found exists; choose another name, or remove it\n")


def test_mistakes_are_told_without_a_run(tmp_path: Path, cli: launching.Cli) -> None:
    assert f"{tmp_path} has no traces" in cli("profile", tmp_path, code=2).err
    assert "did you mean h100?" in cli("profile", ROOT / "train_configs/debug.toml", "--hardware", "h101", code=2).err
