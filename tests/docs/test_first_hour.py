"""The first hour on a GPU, rehearsed on a CPU: every command runs, and a second call continues."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.published_gpu import RUNS

ROOT = Path(__file__).parents[2]
OURS = ("plain.", "titanlike.")  # rows that need no other project


def first_hour(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments, "--rehearse", "--out", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.minutes
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(("tests", "ladder_8b"), id="some", marks=pytest.mark.slow),
        pytest.param(("first-hour", *RUNS), id="all", marks=pytest.mark.every),
    ],
)
def test_the_first_hour_runs_on_a_cpu(parts: tuple[str, ...], tmp_path: Path) -> None:
    done = first_hour(tmp_path, *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    states = json.loads((tmp_path / "parts.json").read_text())
    assert list(states) == [name for part in parts for name in (gpu.FIRST_HOUR if part == "first-hour" else (part,))]
    for name in states:
        if name.startswith("tests"):
            continue
        found = json.loads((tmp_path / f"{name}.json").read_text())
        rows = [row for row in found.get("rows", {}) if row.startswith(OURS)]
        for row in rows:
            assert "failed" not in found["rows"][row], (name, row, found["rows"][row])
            assert found["rows"][row].get("losses_match", True) or "float8" in name + row, (name, row)
    assert first_hour(tmp_path, *parts).stdout.splitlines() == [f"{name}: done before" for name in states]
