"""Training on one GPU: compiled, in bfloat16, with CPU offload."""

from pathlib import Path

import pytest
import torch

from tests.launching import SMALL, losses, records, run
from titanlike.parallelisms.context import prefix_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("options", [{"compile.mode": "none"}, {"compile.mode": "block"}], ids=str)
def test_training_reports_mfu_and_memory(tmp_path: Path, options: dict[str, str]) -> None:
    data = {"data.source": "python_stdlib", "training.steps": "40", "training.compute_dtype": "bfloat16"}
    done = run(tmp_path, variables=ON_GPU, real=True, **SMALL | data | options | {"run.name": "r"})
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path / "runs/r")
    assert found[40] < found[1] - 1.0
    last = [record for record in records(tmp_path / "runs/r") if "loss" in record][-1]
    assert last["mfu"] is None or 0 < last["mfu"] < 1
    assert 0 < last["memory_gib"] < 4


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 64), (2, 128), (1, 64)])
def test_prefix_attention_matches_a_mask(kv_heads: int, head_dim: int) -> None:
    """Compares the kernel that context parallelism uses with a masked one."""
    q = torch.randn(2, 8, 256, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(2, kv_heads, 1024, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv"
    )
    results = []
    for documents in (None, (torch.zeros(2, 256, device="cuda"), torch.zeros(2, 1024, device="cuda"))):
        out = prefix_attention(
            q, k, v, documents
        )  # document ids select the masked kernel; a single document masks nothing
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for unmasked, masked in zip(*results, strict=True):
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
    assert offloaded == pytest.approx(resident, rel=1e-5)
