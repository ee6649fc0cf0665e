"""Document masks on a GPU: FlexAttention with block masks against the dense mask, and its memory."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.documents import documents, zigzag
from tests.launching import SMALL, losses, run
from titanlike.models.common.document_mask import (
    DocumentMask,
    block_mask_attention,
    document_block_mask,
    document_dense_mask,
)
from titanlike.tools.null_gpu.values import compare_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


def qkv(dtype: torch.dtype, kv_heads: int, head_dim: int, queries: int, keys: int) -> list[Tensor]:
    shapes = (8, queries), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(2, *shape, head_dim, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("length", "kv_heads", "head_dim", "dtype", "tolerance", "ranks"), [
    (2048, 2, 128, torch.bfloat16, 2e-2, 1),
    (2048, 1, 64, torch.bfloat16, 2e-2, 2),  # context parallelism
    (2048, 2, 128, torch.float32, 1e-4, 1),
    (320, 8, 16, torch.bfloat16, 2e-2, 1),
    (320, 2, 64, torch.float32, 1e-4, 2),
])  # fmt: skip
def test_flex_attention_equals_dense_attention(
    length: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float, ranks: int
) -> None:
    ids = documents(length, length // 5).cuda()
    local = zigzag(length, 2, 1).cuda() if ranks > 1 else torch.arange(length, device="cuda")
    arguments = local, torch.arange(length, device="cuda"), ids[:, local], ids
    inputs = qkv(dtype, kv_heads, head_dim, len(local), length)
    found = block_mask_attention(*inputs, document_block_mask(*arguments))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = document_dense_mask(*arguments)
    expected = F.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=kv_heads != 8)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, inputs, upstream.to(dtype))
    exact_gradients = torch.autograd.grad(expected, exact, upstream)
    for one, other in zip((found, *gradients), (expected, *exact_gradients), strict=True):
        assert one.shape == other.shape
        with compare_values():
            assert ((one.double() - other).abs().max() / other.abs().max()).item() < tolerance


def test_the_backward_pass_is_deterministic() -> None:
    ids = documents(2048, 300).cuda()
    mask, inputs = DocumentMask()(ids), qkv(torch.bfloat16, 2, 64, 2048, 2048)
    assert not isinstance(mask, Tensor)  # on CUDA it is a block mask
    runs = [torch.autograd.grad(block_mask_attention(*inputs, mask).sum(), inputs) for _ in range(3)]
    with compare_values():
        assert all(torch.equal(one, other) for again in runs[1:] for one, other in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("options", [
    {"compile.mode": "none", "activation_checkpoint.mode": "full"},
    {"compile.mode": "block", "activation_checkpoint.mode": "selective"},
], ids=str)  # fmt: skip
def test_training_with_document_masks_matches_the_dense_mask(tmp_path: Path, options: dict[str, str]) -> None:
    data = {"data.source": "python_stdlib", "data.document_masks": "true", "training.steps": "5"}
    found = []
    for kernel in ("auto", "math"):  # math uses the dense mask
        changed = options | {"training.attention": kernel, "run.name": kernel, "training.compute_dtype": "float32"}
        done = run(tmp_path, variables=ON_GPU, real=True, **SMALL | data | changed)
        assert done.returncode == 0, done.stderr
        found.append(losses(tmp_path / "runs" / kernel))
    assert found[0].keys() == found[1].keys()
    with compare_values():
        assert found[0] == pytest.approx(found[1], rel=5e-4)  # 1e-4 after five steps on an H200
