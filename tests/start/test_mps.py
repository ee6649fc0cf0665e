"""`run.device = "mps"`: refused where an Apple GPU lacks a feature, and trained on where there is one."""

import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.launching import SMALL, losses, records, run
from titanlike.config import UserError
from titanlike.distributed import collectives, environment, process_group
from titanlike.distributed.environment import RankInfo
from titanlike.metrics.hardware import device_name, peak_memory_gib
from titanlike.parallelisms.mesh import build_mesh
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.checks import check_machine
from titanlike.run.run_dir import machine_metadata
from titanlike.utils import system

DEBUG = Path(__file__).parents[2] / "train_configs/debug.toml"
MPS = torch.device("mps")


def recipe(**overrides: str) -> PretrainRecipe:
    return load(PretrainRecipe, DEBUG, {"run.device": "mps", **overrides})


def test_machines_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(UserError, match=r"is an Apple GPU, but this system is linux; set run.device = 'auto'"):
        check_machine(recipe())
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("13.6", ("", "", ""), "arm64"))
    check_machine(recipe())
    with pytest.raises(
        UserError, match=r"requires macOS 14 on an Apple GPU, but this is macOS 13.6; set it to 'float32'"
    ):
        check_machine(recipe(**{"training.compute_dtype": "bfloat16"}))
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.1", ("", "", ""), "arm64"))
    check_machine(recipe(**{"training.compute_dtype": "bfloat16"}))


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"--device = 'mps', but torch finds no Apple GPU; set --device = 'auto'"):
        process_group.select_device("mps", "--device")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert process_group.select_device("mps", "run.device") == MPS
    monkeypatch.setattr(environment, "rank_info", lambda: RankInfo(world_size=2))
    with pytest.raises(UserError, match=r"run.device = 'mps' is for one process, not 2"):
        process_group.select_device("mps", "run.device")


def test_each_process_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake GPUs, which torch finds or does not find."""
    chosen: list[object] = []
    found = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4, set_device=chosen.append)
    monkeypatch.setattr(torch, "cuda", found)
    monkeypatch.setattr(system, "num_gpus", lambda: 4)
    monkeypatch.setattr(environment, "rank_info", lambda: RankInfo(6, 8, 2, local_world_size=4))
    gpu, cpu = torch.device("cuda", 2), torch.device("cpu")
    assert [process_group.select_device(name, "x") for name in ("auto", "cuda", "cpu")] == [gpu, gpu, cpu]
    assert chosen == [gpu, gpu]
    found.device_count = lambda: 3
    with pytest.raises(UserError, match=r"^4 processes on this machine, but 3 GPU\(s\): each process needs one"):
        process_group.select_device("auto", "x")
    found.is_available = lambda: False
    for name, message in (("auto", r"has 4 GPU\(s\) that"), ("cuda", "x = 'cuda', but torch finds no GPU")):
        with pytest.raises(UserError, match=message):
            process_group.select_device(name, "x")
    assert process_group.select_device("cpu", "x") == cpu


def test_what_depends_on_the_device(alone: None) -> None:
    assert collectives.sum_dtype(MPS) == torch.float32
    assert collectives.sum_dtype(torch.device("cpu")) == torch.float64
    assert build_mesh("mps").fsdp.size() == 1
    assert device_name(MPS) == "mps" and peak_memory_gib(MPS) > 0
    found = machine_metadata(MPS)
    assert found.keys() == {"device", "torch", "chip", "system"} and found["device"] == "mps"


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no Apple GPU")
def test_training_resumes_and_is_close_to_the_cpu(tmp_path: Path) -> None:
    changes: dict[str, Any] = SMALL | {"validation.interval": "3", "data.source": "python_stdlib"}
    for device in ("cpu", "mps"):
        for steps in ("3", "6"):
            overrides = changes | {
                "run.name": device, "run.device": device, "training.steps": steps, "schedule.decay": "none",
            }  # fmt: skip
            done = run(tmp_path, **overrides)
            assert done.returncode == 0, done.stderr
    expected, found = (losses(tmp_path / "runs" / device) for device in ("cpu", "mps"))
    assert found.keys() == expected.keys() == set(range(1, 7))
    # Both draw other initial weights, from the same distribution.
    assert all(abs(found[step] - expected[step]) < 0.2 for step in found)
    assert sum("validation_loss" in record for record in records(tmp_path / "runs/mps")) == 2
