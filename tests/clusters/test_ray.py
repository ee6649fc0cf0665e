"""A sweep on a local Ray cluster has the results of the same sweep without Ray. Requires Ray:

pip install -e ".[ray]" && pytest -n 0 -m slow tests/clusters
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from titanlike.config.shipped import shipped_recipes
from titanlike.recipe.load import dump
from titanlike.tools.sweep.config import load_sweep
from titanlike.tools.sweep.results import read_results
from titanlike.tools.sweep.scheduler import run_sweep
from titanlike.tools.sweep.study import Study

if importlib.util.find_spec("ray") is None:
    pytest.skip('Ray is not installed; run: pip install -e ".[ray]"', allow_module_level=True)

import ray

pytestmark = [
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.filterwarnings("default"),
]  # Ray's warnings are not ours


RUN = {
    "extends": str(shipped_recipes()["debug"]),
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


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_sweep_on_ray_has_the_same_results(tmp_path: Path, cluster: None) -> None:
    for name, values in (("recipe", RUN), ("sweep", SWEEP | {"trials": 4})):
        (tmp_path / f"{name}.toml").write_text(dump(values))
    file = tmp_path / "sweep.toml"
    local = load_sweep(file, {"dir": str(tmp_path / "local")})
    run_sweep(local)
    plan = load_sweep(file, {"dir": str(tmp_path / "ray"), "resources.backend": "ray"})
    Study(plan).create_trial()  # of a sweep that was killed
    run_sweep(plan)
    results = read_results(plan.path)
    assert results == read_results(local.path)
    assert {trial["state"] for trial in results["trials"]} == {"complete", "pruned"}
