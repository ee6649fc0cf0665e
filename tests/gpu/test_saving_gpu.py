"""Saves from a GPU, whose copies overlap the next step."""

from pathlib import Path

import pytest
import torch

from tests.launching import SMALL, losses, run
from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.checkpoint.loader import read_whole
from titanlike.config.sections import Checkpoint
from titanlike.tools.null_gpu.values import compare_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_steps_right_after_a_save_do_not_affect_it(alone: None, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, device="cuda") for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.ones(8, 2048, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with CheckpointManager(str(tmp_path), Checkpoint(keep=9)) as checkpoints:
        expected = {}
        for number in (1, 2, 3):
            expected[number] = {name: value.cpu() for name, value in model.state_dict().items()}
            checkpoints.save(model, optimizer, CheckpointMetadata(number, {}, "", {}, {}))
            for _ in range(5):
                step()
    for number, weights in expected.items():
        found = read_whole(tmp_path / f"step-{number:08d}")["model"]
        assert found.keys() == weights.keys(), number
        with compare_values():
            assert all(torch.equal(found[name], value) for name, value in weights.items()), number


def test_a_resumed_run_is_bit_exact(tmp_path: Path) -> None:
    options = SMALL | {"run.deterministic": "true", "checkpoint.interval": "2", "checkpoint.keep": "9"}
    on_gpu = {"CUDA_VISIBLE_DEVICES": "0"}
    for name in ("uninterrupted", "resumed"):
        assert run(tmp_path, variables=on_gpu, real=True, **options | {"run.name": name}).returncode == 0
    done = run(
        tmp_path, variables=on_gpu, real=True, **options | {"run.name": "resumed", "checkpoint.resume_from": "2"}
    )
    assert "resumed at step 2\n" in done.stdout
    found, expected = losses(tmp_path / "runs/resumed"), losses(tmp_path / "runs/uninterrupted")
    assert found.keys() == expected.keys()
    with compare_values():
        assert found == expected
