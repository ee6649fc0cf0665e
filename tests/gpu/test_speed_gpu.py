"""Speed on a GPU: host synchronizations, attention backends, memory of the chunked loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from recipes import pretrain
from tests.loss_errors import linear_cross_entropy
from tests.shrunk import STEPS, WARM, before_each_step, small
from titanlike.models.common.layers import attention_backend
from titanlike.tools.null_gpu.values import compare_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("compiled", ["none", "block"])
@pytest.mark.parametrize("name", ["gpt2_124m", "llama3_1b", "llama3_8b"])
def test_no_host_synchronization_in_a_step(tmp_path: Path, name: str, compiled: str) -> None:
    options: dict[str, Any] = {"run.device": "cuda", "compile.mode": compiled, "compile.backend": "inductor"}
    recipe = small(tmp_path, name, "one", **options)

    def before(step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if WARM <= step < STEPS else "default")

    try:
        with before_each_step(before):
            pretrain.main(recipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attention_kernels(choice: str) -> str:
    q, k, v = (torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    with (
        attention_backend(choice),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled,
    ):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return " ".join(event.key for event in profiled.key_averages())


def test_attention_backend_is_cudnn_by_default_and_selectable() -> None:
    assert "_scaled_dot_product_flash_attention" in attention_kernels("flash")
    if torch.cuda.get_device_capability() >= (9, 0):
        assert "_scaled_dot_product_cudnn_attention" in attention_kernels("auto")


@pytest.mark.parametrize("backend", ["", "inductor"])
def test_chunked_loss_saves_memory(backend: str) -> None:
    tokens, dim, vocab_size = 8192, 512, 65536
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocab_size, dim, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab_size, (tokens,), device="cuda")
    peaks, gradients = {}, {}
    for chunk in (0, 1024):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = linear_cross_entropy(x[None], weight, labels[None], chunk=chunk, backend=backend)
        gradients[chunk] = torch.autograd.grad(loss / tokens, (x, weight))
        peaks[chunk] = torch.cuda.max_memory_allocated() - before
    assert peaks[1024] < peaks[0] / 3
    for one, other in zip(*gradients.values(), strict=True):
        assert one.shape == other.shape
        with compare_values():
            assert ((one - other).float().norm() / other.float().norm()).item() < 0.01
