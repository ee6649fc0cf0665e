"""Components of the parallelisms: context-parallel attention, dropout, vocabulary-parallel loss, tensor-parallel plans."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from tests.pool import Ranks
from tests.training import build, mesh_of, tiny
from titanlike.config.sections import Parallelism
from titanlike.models.common.document_mask import DocumentMask
from titanlike.models.common.dropout import Dropout
from titanlike.models.common.layers import DotProductAttention
from titanlike.parallelisms.context import (
    ContextParallelAttention,
    ContextParallelMask,
    context_position_ids,
    gather_sequence,
)


def _attention(ranks: int, kv_heads: int, with_documents: bool) -> tuple[float, float]:
    """Returns the largest errors of context-parallel attention, in its result and in its gradients."""
    generator = torch.Generator().manual_seed(1)
    mesh = mesh_of("cpu", context=ranks).context
    full = [torch.randn(2, heads, 48, 8, generator=generator) for heads in (4, kv_heads, kv_heads)]
    documents = torch.randint(0, 3, (2, 48), generator=generator).cumsum(1) if with_documents else None
    position_ids = context_position_ids(48, mesh)

    plain = [x.clone().requires_grad_() for x in full]
    expected = DotProductAttention()(*plain, DocumentMask()(documents))
    expected.square().sum().backward()

    local = [x[:, :, position_ids].clone().requires_grad_() for x in full]
    local_ids = None if documents is None else documents[:, position_ids]
    mask = ContextParallelMask(mesh)(local_ids)
    found = ContextParallelAttention(mesh)(*local, mask)
    found.square().sum().backward()
    assert torch.equal(gather_sequence(position_ids[None], 1, mesh)[0], torch.arange(48))
    worst = max((a.grad - b.grad[:, :, position_ids]).abs().max().item() for a, b in zip(local, plain, strict=True))
    return (found - expected[:, :, position_ids]).abs().max().item(), worst


def _block_mask_attention(ranks: int, kv_heads: int) -> float:
    """Returns the largest error of context-parallel attention with a block mask, and of its gradients, in a compiled block."""
    generator = torch.Generator().manual_seed(1)
    mesh = mesh_of("cpu", context=ranks).context
    full = [torch.randn(2, heads, 320, 16, generator=generator) for heads in (4, kv_heads, kv_heads)]
    documents = (torch.rand(2, 320, generator=generator) < 0.02).cumsum(1)
    position_ids = context_position_ids(320, mesh)
    attend = torch.compile(ContextParallelAttention(mesh), backend="aot_eager", fullgraph=True)
    results = []
    validate = flex_attention._validate_device
    flex_attention._validate_device = lambda *_: None  # it refuses gradients on a CPU
    try:
        for flex in (False, True):
            mask = ContextParallelMask(mesh, flex=flex)(documents[:, position_ids])
            assert isinstance(mask, Tensor) != flex
            local = [x[:, :, position_ids].clone().requires_grad_() for x in full]
            out = attend(*local, mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), local)))
    finally:
        flex_attention._validate_device = validate
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_context_parallel_block_masks_equal_dense_masks(ranks: Ranks, kv_heads: int) -> None:
    assert max(ranks(2).run(_block_mask_attention, 2, kv_heads)) < 1e-4


def test_context_parallelism_refuses_the_mask_of_the_local_tokens(ranks: Ranks) -> None:
    with pytest.raises(Exception, match=r"the mask is for 24 keys, but context parallelism gathers 48; pass the model"):
        ranks(2).run(_local_mask)


def _local_mask() -> None:
    mesh = mesh_of("cpu", context=2).context
    q = torch.randn(1, 2, 24, 8)
    ContextParallelAttention(mesh)(q, q, q, DocumentMask()(torch.zeros(1, 24)))


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_attention_matches_attention(ranks: Ranks, size: int, kv_heads: int, documents: bool) -> None:
    for result, gradients in ranks(size).run(_attention, size, kv_heads, documents):
        assert result < 1e-5 and gradients < 1e-4


def test_dropout_rate_and_mean() -> None:
    bits = torch.randint(0, 2**32, (8, 128), generator=torch.Generator().manual_seed(0))
    x = torch.ones(8, 128, 96)
    dropped = Dropout(0.3, site=1)(x, bits)
    zero = dropped == 0
    assert zero.float().mean().item() == pytest.approx(0.3, abs=0.005)
    assert (
        zero.float().mean((0, 1)).std() < 0.03 and zero.float().mean(2).std() < 0.06
    )  # uniform over channels and tokens
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(dropped, Dropout(0.3, site=1)(x, bits))
    other = Dropout(0.3, site=2)(x, bits) == 0
    assert (zero & other).float().mean().item() == pytest.approx(0.09, abs=0.005)  # sites are independent
    assert torch.equal(Dropout(0.3, site=1)(x, None), x)  # as in validation


def _children_of_parts() -> list[bool]:
    model: Any = build(tiny(Path(), "", parallelism=Parallelism(pipeline=2), training=dict(compute_dtype="bfloat16")))[
        0
    ]
    return [
        model.get_submodule(name) is child
        for part in model.parts.values()
        for name, child in part.named_modules()
        if name and name != "layers"
    ]


def test_a_pipeline_registers_the_modules_that_have_replaced_those_of_its_stages(ranks: Ranks) -> None:
    for same in ranks(2).run(_children_of_parts):
        assert len(same) >= 10 and all(same)
