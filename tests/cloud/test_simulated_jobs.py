"""A job on loopback: two hosts with nothing in common but the network and what stands for S3, by the real entry and request."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from instances import INSTANCE_TYPES
from bundle import make_bundle
from request import Job, request_for
from simulate import Simulation

from tests.forkserver import ROOT, Forked
from titanlike.checkpoint import read_whole

DEBUG = ROOT / "train_configs/debug.toml"
STEPS = 60
TINY = {
    "model.dim": 64, "model.num_layers": 2, "model.num_heads": 2, "model.num_kv_heads": 1, "model.ffn_dim": 96,
    "data.source": "synthetic", "training.seq_len": 32, "training.global_batch_size": 4, "training.local_batch_size": 2,
    "schedule.warmup_steps": 2, "validation.interval": 0, "sample.tokens": 0, "metrics.interval": 1, "checkpoint.interval": 25,
    "model.dropout": 0.1, "training.steps": STEPS,
}  # fmt: skip
JOB = Job(
    run="tiny", timestamp="20261122-101112", arguments=(), instance_type=INSTANCE_TYPES["ml.p5.48xlarge"], num_instances=2, region="us-east-1",
    role="arn:aws:iam::123456789012:role/training", bucket="ours", image="image",
)  # fmt: skip


def start(
    folder: Path, stamp: str, recipe: Path = ROOT / "train_configs/debug.toml", processes: int = 1, **changes: Any
) -> Simulation:
    """A job of the run `tiny` in this folder, which goes on with the one before it there."""
    keys = TINY | {name.replace("__", "."): value for name, value in changes.items() if "__" in name}
    parcel = pack(recipe, [f"--{key}={value}" for key, value in keys.items()], 2, s3=False)
    job = replace(JOB, timestamp=stamp, words=parcel.words, **{k: v for k, v in changes.items() if "__" not in k})
    return Simulation(request_for(job), parcel, folder, processes)


def finish(simulation: Simulation, *codes: int) -> list[str]:
    """Wait for it, and see that its hosts ended like this. Returns what they said."""
    ended = simulation.wait()
    said = [line for host in simulation.hosts for line in host.said]
    assert tuple(one.code for one in ended) == codes, said
    return said


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    lines = (folder / "s3/ours/titanlike/runs/tiny/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {one["step"]: (one["loss"], one["grad_norm"]) for one in records if "loss" in one}


def wait_for(found: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.slow
def test_stopped_on_one_host_a_run_goes_on_in_the_next_job_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = finish(start(whole, "20261122-000001"), 0, 0)
    assert "ranks   2 on cpu; compute float32, compile none" in said
    first = start(parts, "20261122-000001")
    wait_for(lambda: any(f"step      5/{STEPS}" in line for line in first.hosts[0].said))
    first.hosts[1].stop()  # SIGTERM to the first process of one host, as when spot capacity is taken away
    said = finish(first, 143, 143)
    reached = max(losses(parts))
    assert 5 <= reached < STEPS
    assert any(line.startswith(f"stopped by SIGTERM; to go on from step {reached}: ") for line in said)
    events = (parts / "s3/ours/titanlike/runs/tiny/tensorboard").iterdir()
    assert any(event.stat().st_size > 1000 for event in events)
    # The next job of the run has the folder and the checkpoints back, on hosts that have nothing else.
    said = finish(start(parts, "20261122-000002"), 0, 0)
    assert f"resumed at step {reached}" in said
    assert losses(parts) == losses(whole) and set(losses(whole)) == set(range(1, STEPS + 1))
    found, expected = (
        read_whole(folder / f"s3/ours/titanlike/checkpoints/tiny/step-{STEPS:08}") for folder in (parts, whole)
    )
    for kind, tensors in expected.items():
        assert tensors.keys() == found[kind].keys()
        for name, value in tensors.items():
            assert torch.equal(value, found[kind][name]), name


@pytest.mark.slow
def test_ctrl_c_stops_a_simulation_as_the_service_stops_a_job(tmp_path: Path) -> None:
    keys = [f"--{key}={value}" for key, value in (TINY | {"training.steps": 5000}).items()]
    words = ["sagemaker/launch.py", "train_configs/debug.toml", "--num_instances=2", "--simulate", f"--folder={tmp_path}"]
    command = [sys.executable, *words, "--run=tiny", "--bucket=ours", *keys]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout
    next(line for line in job.stdout if "step      3/5000" in line)
    job.send_signal(signal.SIGINT)
    said, errors = job.communicate(timeout=60)
    assert errors == "stopping, as SageMaker stops a job: it saves and leaves; again to end it at once\n"
    assert said.endswith("algo-1: stopped\nalgo-2: stopped\n") and job.returncode == 143
    assert (tmp_path / f"s3/ours/titanlike/checkpoints/tiny/step-{max(losses(tmp_path)):08}/manifest.json").exists()


@pytest.mark.slow
def test_a_smoke_job_measures_and_trains_a_little(tmp_path: Path) -> None:
    said = finish(start(tmp_path, "20261122-000001", num_instances=1, smoke=True, processes=2), 0)
    assert "smoke: no GPU, or no driver of one" in said
    assert any(re.fullmatch(r"smoke: all-reduce of 16 MiB over 2: [\d.]+ ms, [\d.]+ GB/s", line) for line in said)
    assert any(line.startswith("step     20/20  loss ") for line in said)
    assert not (tmp_path / "s3/ours/titanlike/checkpoints").exists()


def test_a_crash_on_one_host_leaves_its_cause_on_that_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("simulate.subprocess", forked)
    program = (ROOT / "recipes/pretrain.py").read_text()
    crash = (
        "            if step == 3 and distributed.dist.get_rank() == 1:\n"
        "                raise RuntimeError('the disk is on fire')\n"
    )
    anchor = "            watchdog.step(step)\n"
    assert program.count(anchor) == 1
    (tmp_path / "burning.py").write_text(program.replace(anchor, anchor + crash))
    recipe = tmp_path / "burning.toml"
    recipe.write_text(f'extends = "{ROOT}/train_configs/debug.toml"\nrecipe = "burning"\n')
    job = start(tmp_path / "job", "20261122-000001", recipe)
    wait_for(lambda: any(f"step      2/{STEPS}" in line for line in job.hosts[0].said))
    wait_for((job.hosts[1].root / "output/failure").exists)
    other, burnt = job.wait()
    assert burnt.failure.splitlines()[0] == (
        "127.0.0.2: RuntimeError: the disk is on fire; process 1 ended with exit code 1; its own words are above"
    )
    assert burnt.code == 1 and other.code in (1, 143)  # it may be told to stop before it has noticed
    assert "Traceback (most recent call last)" in burnt.failure and "burning.py" in burnt.failure
    assert "the disk is on fire" not in other.failure
