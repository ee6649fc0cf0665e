"""Simulated jobs: hosts that share only the loopback network and the folder that replaces S3, with the real entry point."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoints import assert_equal_state
from tests.cloud.settings import STEPS, TINY
from tests.forkserver import ROOT, Forked
from titanlike.checkpoint.loader import read_whole
from titanlike.tools.clusters.sagemaker.bundle import make_bundle
from titanlike.tools.clusters.sagemaker.request import TrainingJob, request_for
from titanlike.tools.clusters.sagemaker.simulate import Simulation
from titanlike.tools.planning.hardware import load_hardware

DEBUG = ROOT / "train_configs/debug.toml"
JOB = TrainingJob(
    run="tiny", timestamp="20261122-101112", arguments=(),
    instance_type="ml.p5.48xlarge", hardware=load_hardware("ml.p5.48xlarge"), nodes=2,
    region="us-east-1", role="arn:aws:iam::123456789012:role/training", bucket="example", image="image",
)  # fmt: skip


def start(
    folder: Path, timestamp: str, recipe: Path = ROOT / "train_configs/debug.toml", processes: int = 1, **changes: Any
) -> Simulation:
    """Starts a job of the run `tiny`, which resumes from the previous job in this folder."""
    keys = TINY | {name.replace("__", "."): value for name, value in changes.items() if "__" in name}
    bundle = make_bundle(recipe, {key: str(value) for key, value in keys.items()}, 2, s3=False)
    job = replace(
        JOB, timestamp=timestamp, arguments=bundle.arguments, **{k: v for k, v in changes.items() if "__" not in k}
    )
    return Simulation(request_for(job), bundle, folder, processes)


def finish(simulation: Simulation, *codes: int) -> list[str]:
    """Waits for a job, and checks the exit codes of its hosts. Returns their output."""
    results = simulation.wait()
    lines = [line for host in simulation.hosts for line in host.lines]
    assert tuple(result.code for result in results) == codes, lines
    return lines


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    lines = (folder / "s3/example/titanlike/runs/tiny/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {one["step"]: (one["loss"], one["grad_norm"]) for one in records if "loss" in one}


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_job_finds_the_hooks_that_an_installation_has(tmp_path: Path) -> None:
    make_bundle(DEBUG, {}, 1, s3=False).write(tmp_path)
    [found] = metadata.distributions(path=[str(tmp_path)])
    assert found.metadata["Name"] == "titanlike"
    hooks = {(each.group, each.name, each.value) for each in found.entry_points}
    installed = metadata.distribution("titanlike").entry_points
    assert hooks == {(e.group, e.name, e.value) for e in installed if e.group.startswith("titanlike.")} != set()


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr("titanlike.tools.clusters.sagemaker.simulate.subprocess", forked)


@pytest.mark.slow
def test_a_job_after_an_interruption_is_bit_identical(tmp_path: Path) -> None:
    full, parts = tmp_path / "full", tmp_path / "parts"
    lines = finish(start(full, "20261122-000001"), 0, 0)
    assert "ranks   2 on cpu; compute float32, compile none" in lines
    first = start(parts, "20261122-000001")
    wait_for(lambda: any(f"step      5/{STEPS}" in line for line in first.hosts[0].lines))
    first.hosts[1].stop()  # SIGTERM to the first process of one host, as at a spot interruption
    lines = finish(first, 143, 143)
    reached = max(losses(parts))
    assert 5 <= reached < STEPS
    assert any(line.startswith(f"stopped by SIGTERM; to resume from step {reached}: ") for line in lines)
    events = (parts / "s3/example/titanlike/runs/tiny/tensorboard").iterdir()
    assert any(event.stat().st_size > 1000 for event in events)
    # The next job restores the run folder and the checkpoints on new hosts.
    lines = finish(start(parts, "20261122-000002"), 0, 0)
    assert f"resumed at step {reached}" in lines
    assert losses(parts) == losses(full) and set(losses(full)) == set(range(1, STEPS + 1))
    found, expected = (
        read_whole(folder / f"s3/example/titanlike/checkpoints/tiny/step-{STEPS:08}") for folder in (parts, full)
    )
    assert_equal_state(found, expected)


def test_the_failure_file_of_a_crashed_host_has_the_cause(tmp_path: Path) -> None:
    program = (ROOT / "recipes/pretrain.py").read_text()
    crash = (
        "            if step == 3 and __import__('torch').distributed.get_rank() == 1:\n"
        "                raise RuntimeError('simulated crash')\n"
    )
    anchor = "        for step, microbatches in run.steps():  # to the last, or until all ranks agree to stop\n"
    assert program.count(anchor) == 1
    (tmp_path / "crashing.py").write_text(program.replace(anchor, anchor + crash))
    recipe = tmp_path / "crashing.toml"
    recipe.write_text(f'extends = "{ROOT}/train_configs/debug.toml"\nprogram = "crashing"\n')
    job = start(tmp_path / "job", "20261122-000001", recipe)
    wait_for(lambda: any(f"step      2/{STEPS}" in line for line in job.hosts[0].lines))
    wait_for((job.hosts[1].root / "output/failure").exists)
    other, crashed = job.wait()
    assert crashed.failure.splitlines()[0] == (
        "127.0.0.2: RuntimeError: simulated crash; process 1 exited with code 1; see its output above"
    )
    assert crashed.code == 1 and other.code in (1, 143)  # it may be stopped before it notices the crash
    assert "Traceback (most recent call last)" in crashed.failure and "crashing.py" in crashed.failure
    assert "simulated crash" not in other.failure
