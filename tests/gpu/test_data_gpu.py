"""Prefetched batches arrive on the GPU unchanged, through pinned memory."""

import numpy as np
import pytest
import torch

from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import PackedDataset, ShuffledMixture
from titanlike.data.tokens.arrays import InMemoryTokens
from titanlike.data.tokens.tokenizer import Separator
from titanlike.tools.null_gpu.values import compare_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def batches(device: torch.device) -> BatchLoader:
    tokens = InMemoryTokens(np.random.default_rng(0).integers(0, 500, 3_000_000, dtype=np.uint16))
    source = ShuffledMixture([PackedDataset(tokens, 2048)], seed=0, global_batch_size=16)
    return BatchLoader(
        source, global_batch_size=16, local_batch_size=4, data_rank=0, num_data_ranks=1, seed=0, device=device,
        document_separator=Separator(7, closes=True),
    )  # fmt: skip


def test_prefetched_batches_arrive_unchanged() -> None:
    on_cpu, on_gpu = batches(torch.device("cpu")), batches(torch.device("cuda", 0))
    _, tensors, _ = on_gpu.build(1)
    assert all(tensor.is_pinned() for tensor in tensors.values())
    with on_gpu.prefetch(3, 1, 60):
        for step in range(1, 61):
            busy = torch.randn(4096, 4096, device="cuda")
            busy = busy @ busy  # keeps copies in flight while the next batches are built
            for actual, expected in zip(on_gpu.microbatches(step), on_cpu.microbatches(step), strict=True):
                pairs = (
                    (actual.labels, expected.labels),
                    *((actual.inputs[name], value) for name, value in expected.inputs.items()),
                )
                for found, value in pairs:
                    assert (found.shape, found.dtype) == (value.shape, value.dtype)
                    with compare_values():
                        assert torch.equal(found.cpu(), value)
