"""Training on one GPU: compiled, in bfloat16, with CPU offload."""

from pathlib import Path

import pytest
import torch

from tests.launching import SMALL, losses, records, run
from tests.loss_errors import weight_gradient_errors
from titanlike.parallelisms.context import prefix_attention
from titanlike.tools.null_gpu.values import compare_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("options", [{"compile.mode": "none"}, {"compile.mode": "block"}], ids=str)
def test_training_reports_mfu_and_memory(tmp_path: Path, options: dict[str, str]) -> None:
    data = {
        "data.source": "python_stdlib", "training.steps": "40", "training.compute_dtype": "bfloat16",
    }  # fmt: skip
    done = run(tmp_path, variables=ON_GPU, real=True, **SMALL | data | options | {"run.name": "r"})
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path / "runs/r")
    with compare_values():
        assert found[40] < found[1] - 1.0
    last = [record for record in records(tmp_path / "runs/r") if "loss" in record][-1]
    with compare_values():
        assert last["mfu"] is None or 0 < last["mfu"] < 1
    assert 0 < last["memory_gib"] < 4


def test_lora_on_conversations_learns_and_starts_at_the_loss_of_the_cpu(tmp_path: Path) -> None:
    """Compiled, in bfloat16, with the masks of packed conversations."""
    keys = {
        "program": "finetune", "data.source": "synthetic_chat", "lora.rank": "8", "training.seq_len": "128",
        "training.steps": "40",
    }  # fmt: skip
    on_gpu = {"run.name": "gpu", "training.compute_dtype": "bfloat16", "compile.mode": "block", "optimizer.lr": "1e-2"}
    on_cpu = {"run.name": "cpu", "training.compute_dtype": "float32", "compile.mode": "none", "run.device": "cpu"}
    for own, variables in ((on_gpu, ON_GPU), (on_cpu | {"training.steps": "2"}, {})):
        done = run(tmp_path, variables=variables, real=True, **SMALL | keys | own)
        assert done.returncode == 0, done.stderr
    found, expected = losses(tmp_path / "runs/gpu"), losses(tmp_path / "runs/cpu")
    with compare_values():
        assert found[1] == pytest.approx(expected[1], rel=1e-2)
    with compare_values():
        assert found[40] < found[1] - 0.1


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 64), (2, 128), (1, 64)])
def test_prefix_attention_matches_a_mask(kv_heads: int, head_dim: int) -> None:
    """Compares the kernel that context parallelism uses with a masked one."""
    q = torch.randn(2, 8, 256, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(2, kv_heads, 1024, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv"
    )
    results = []
    keys = torch.arange(1024, device="cuda")
    for mask in (None, (keys[-256:, None] >= keys)[None, None]):
        out = prefix_attention(q, k, v, mask)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for unmasked, masked in zip(*results, strict=True):
        assert unmasked.shape == masked.shape
        with compare_values():
            torch.testing.assert_close(unmasked, masked, rtol=2e-2, atol=2e-2)


def test_cpu_offload_does_not_change_losses(tmp_path: Path) -> None:
    for offload in ("false", "true"):
        done = run(
            tmp_path,
            variables=ON_GPU,
            real=True,
            **SMALL | {"parallelism.cpu_offload": offload, "run.name": f"offload-{offload}"},
        )
        assert done.returncode == 0, done.stderr
    resident, offloaded = (losses(tmp_path / f"runs/offload-{offload}") for offload in ("false", "true"))
    with compare_values():
        assert offloaded == pytest.approx(resident, rel=1e-5)


def test_many_chunks_of_the_loss_are_as_exact_as_one() -> None:
    """On a GPU, a matmul with float32 output accumulates the weight's gradient."""
    unchunked, *chunked = weight_gradient_errors([0, 32, 1024], device="cuda")
    with compare_values():
        assert unchunked < 4e-3
    with compare_values():
        assert max(chunked) < 1.2 * unchunked
