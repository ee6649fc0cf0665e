"""What only a GPU can show of training: that it trains, compiled and in bfloat16, and that offloading changes no number."""

from pathlib import Path

import pytest
import torch

from tests.launching import SMALL, losses, records, run
from titanlike.parallelisms.context import attend_to_prefix

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("options", [{"compile.mode": "none"}, {"compile.mode": "block"}], ids=str)
def test_a_gpu_trains_and_knows_its_peak(tmp_path: Path, options: dict[str, str]) -> None:
    data = {"data.source": "python_stdlib", "training.steps": "40", "training.compute_dtype": "bfloat16"}
    done = run(tmp_path, variables=ON_GPU, real=True, **SMALL | data | options | {"run.name": "r"})
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path / "runs/r")
    assert found[40] < found[1] - 1.0
    last = [record for record in records(tmp_path / "runs/r") if "loss" in record][-1]
    assert last["mfu"] is None or 0 < last["mfu"] < 1
    assert 0 < last["memory_gib"] < 4


@pytest.mark.parametrize(("kv_heads", "width"), [(8, 64), (2, 128), (1, 64)])
def test_the_last_queries_of_a_sequence_see_what_they_should(kv_heads: int, width: int) -> None:
    """The kernel that context parallelism uses, against a mask."""
    q = torch.randn(2, 8, 256, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(2, kv_heads, 1024, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv"
    )
    results = []
    for documents in (None, (torch.zeros(2, 256, device="cuda"), torch.zeros(2, 1024, device="cuda"))):
        out = attend_to_prefix(q, k, v, documents)  # with documents, by a mask; here all are one
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for ours, masked in zip(*results, strict=True):
        torch.testing.assert_close(ours, masked, rtol=2e-2, atol=2e-2)


def test_offloading_to_the_host_gives_the_same_numbers(tmp_path: Path) -> None:
    for offload in ("false", "true"):
        done = run(
            tmp_path,
            variables=ON_GPU,
            real=True,
            **SMALL | {"parallelism.cpu_offload": offload, "run.name": f"offload-{offload}"},
        )
        assert done.returncode == 0, done.stderr
    kept, offloaded = (losses(tmp_path / f"runs/offload-{offload}") for offload in ("false", "true"))
    assert offloaded == pytest.approx(kept, rel=1e-5)
