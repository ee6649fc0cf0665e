"""Mixture of experts on a GPU: torch's grouped matmul, training with compiled blocks, and expert parallelism over NCCL."""

from pathlib import Path

import pytest
import torch

from tests.launching import SMALL, losses, run
from tests.training import Operations
from titanlike.models.common.experts import Router
from titanlike.models.common.grouped_matmul import grouped_matmul
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.parallelisms.mixed_precision import cast_parameters
from titanlike.tools.null_gpu.values import compare_values
from titanlike.utils import compat

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
MOE = {
    name: value for name, value in SMALL.items() if name not in ("model.num_kv_heads", "model.ffn_dim")
} | {"model.name": "qwen3_moe", "model.dim": "256", "model.ffn_dim": "256", "model.balance_bias_rate": "0.001"}  # fmt: skip


@pytest.mark.parametrize("counts", [[100, 0, 37, 375], [512, 0, 0, 0], [500, 3, 0, 500], [0, 0, 0, 0]], ids=str)
def test_the_grouped_matmul_of_torch_equals_one_matmul_per_expert(counts: list[int]) -> None:
    assert compat.grouped_mm is not None
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    x = torch.randn(sum(counts), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(len(counts), 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(counts), weight, strict=True)])
    found = grouped_matmul(x, weight, ends)
    gradient = torch.randn_like(found)
    assert found.shape == expected.shape
    with compare_values():
        assert torch.allclose(found, expected, rtol=2e-2, atol=1e-1)
    for found_gradient, reference in zip(
        torch.autograd.grad(found, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        with compare_values():
            assert torch.allclose(found_gradient, reference, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_router_in_bfloat16_selects_the_experts_of_float32(compiled: bool) -> None:
    """By one matmul with a float32 result, without a float32 copy of its inputs."""
    with torch.device("cuda"):
        router = Router(GptOssConfig(dim=256, num_experts=32, experts_per_token=4))
        x = torch.randn(2, 512, 256, dtype=torch.bfloat16, requires_grad=True)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=256**-0.5)
    cast_parameters(router, torch.bfloat16)
    with Operations() as operations:
        router(x)
    assert (
        operations.counts["mm"] == 1 and operations.counts["_to_copy"] == 2
    )  # of the bias, and of the weights of experts
    routes = (torch.compile(router) if compiled else router)(x)
    routes.weights.float().sum().backward()
    assert x.grad is not None and router.weight.grad is not None
    logits = torch.nn.functional.linear(x.double(), router.weight.double(), router.bias.double())  # type: ignore[union-attr]
    with compare_values():
        assert torch.equal(routes.indices.sort(-1).values, logits.topk(4).indices.sort(-1).values)


def trained(folder: Path, name: str, gpus: str, **options: str) -> dict[int, float]:
    variables = {"CUDA_VISIBLE_DEVICES": gpus, "NPROC": str(len(gpus.split(",")))}
    bf16 = {"training.compute_dtype": "bfloat16", "compile.mode": "block"}
    done = run(folder, variables=variables, real=True, **MOE | bf16 | options | {"run.name": name})
    assert done.returncode == 0, done.stderr
    return losses(folder / "runs" / name)


def test_compiled_training_in_bfloat16_follows_eager_training(tmp_path: Path) -> None:
    expected = trained(tmp_path, "eager", "0", **{"compile.mode": "none"})
    found = trained(tmp_path, "compiled", "0")
    with compare_values():
        assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_expert_parallelism_over_nccl(tmp_path: Path) -> None:
    expected = trained(tmp_path, "sharded", "0,1")
    found = trained(tmp_path, "experts", "0,1", **{"parallelism.expert": "2"})
    with compare_values():
        assert found == pytest.approx(expected, rel=1e-2)
