"""`training.non_finite = "skip"` in a copy of the program with a NaN gradient: steps are skipped, reported and recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, SMALL, run
from tests.recipes.test_copy import edited

SKIP = {"training.non_finite": "skip", "run.name": "r"}


def write_program(directory: Path, condition: str) -> str:
    """Writes a program that sets the gradient of the last norm to NaN, on all ranks, if the condition holds."""
    program = edited(
        (ROOT / "recipes/pretrain.py").read_text(),
        (
            "            norms = gradient_norms(model, mesh.pipeline)\n",
            f"            if {condition}:\n"
            "                getattr(g := model.get_parameter('norm.weight').grad, '_local_tensor', g).fill_(float('nan'))\n"
            "            norms = gradient_norms(model, mesh.pipeline)\n",
        ),
    )
    (directory / "own.py").write_text(program)
    (directory / "own.toml").write_text(f'recipe = "own"\nextends = "{ROOT}/train_configs/debug.toml"\n')
    return "own.toml"


def strict_records(directory: Path) -> list[dict[str, Any]]:
    """Returns the metrics. Fails on NaN, which Python's JSON parser accepts."""
    lines = (directory / "runs/r/metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON")) for line in lines]


@pytest.mark.parametrize("processes", [1, 2])
def test_run_continues_after_skipped_steps(tmp_path: Path, processes: int) -> None:
    recipe = write_program(tmp_path, "step in (2, 5)")
    done = run(tmp_path, recipe, variables={"NPROC": str(processes)}, **SMALL | SKIP)
    assert done.returncode == 0, done.stderr
    holders = ", ".join(map(str, range(processes)))
    cause = f"the loss is finite, but not the gradient of norm.weight, in the shard of rank {holders}"
    assert f"step      2/6  skipped: {cause}\n" in done.stdout
    assert f"step      5/6  skipped: {cause}\n" in done.stdout
    found = strict_records(tmp_path)
    assert [(r["step"], r["skipped"]) for r in found if "skipped" in r] == [(2, cause), (5, cause)]
    norms = {r["step"]: r["grad_norm"] for r in found if "loss" in r}
    assert [step for step, norm in norms.items() if norm is None] == [2, 5]
    assert all(r["loss"] > 0 for r in found if "loss" in r)
    assert (tmp_path / "runs/r/checkpoints/step-00000006/state.json").is_file()


def test_too_many_skipped_steps_stop_the_run(tmp_path: Path) -> None:
    recipe = write_program(tmp_path, "step >= 3")
    done = run(tmp_path, recipe, **SMALL | SKIP | {"training.skip_limit": "2"})
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: step 5: the loss is finite, but not the gradient of norm.weight, in the shard"
    )
    assert "skip number 3 in the last 100 steps (steps 3, 4, 5), more than training.skip_limit = 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert [r["step"] for r in strict_records(tmp_path) if "skipped" in r] == [3, 4]
