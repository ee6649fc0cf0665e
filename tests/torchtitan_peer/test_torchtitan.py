"""Configs and checkpoints of torchtitan 0.3.0 itself. Requires it:

pip install torchtitan==0.3.0 && pytest -n 0 -m slow tests/torchtitan_peer
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import common, migration, other_checkpoints
from benchmarks.other_checkpoints import LAYOUTS, MODELS, VERSIONS, continue_runs
from tests.launching import ROOT, run_forked
from titanlike.tools import programs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed; .ci/run installs it"),
]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Titanlike's own processes start in milliseconds."""
    for module in (common, programs):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run_forked, PIPE=subprocess.PIPE))


def test_all_configs_are_imported_or_refused_as_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks/results/migration_configs.json").read_text())
    assert migration.configs(sys.executable) == recorded
    assert sum("refused" not in row for row in recorded) == 25


@pytest.mark.parametrize("model", MODELS)
def test_runs_continue_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(other_checkpoints, "SAVED", saved := 5)
    monkeypatch.setattr(other_checkpoints, "STEPS", steps := 7)
    runs = continue_runs(model, sys.executable, tmp_path, VERSIONS["torchtitan"], LAYOUTS[-1:])
    assert len(runs) == 4
    for name, losses in runs.items():
        reference = runs[name.partition(",")[0]]
        for step in range(saved + 1, steps + 1):
            assert losses[step] == pytest.approx(reference[step], abs=1e-5), (name, step)
