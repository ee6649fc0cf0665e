"""What only a GPU can show of data: batches made ahead, in pinned memory, arrive as they were made."""

import numpy as np
import pytest
import torch

from titanlike.data.loader import BatchLoader
from titanlike.data.packed_dataset import InMemoryTokens, PackedDataset, ShuffledMixture
from titanlike.data.text.tokenizer import Separator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def batches(device: str) -> BatchLoader:
    tokens = InMemoryTokens(np.random.default_rng(0).integers(0, 500, 3_000_000, dtype=np.uint16))
    feed = ShuffledMixture([PackedDataset(tokens, 2048)], seed=0, global_batch_size=16)
    return BatchLoader(
        feed, global_batch_size=16, local_batch_size=4, data_rank=0, num_data_ranks=1, seed=0, device=torch.device(device),
        document_separator=Separator(7, closes=True),
    )  # fmt: skip


def test_batches_made_ahead_arrive_as_they_were_made() -> None:
    here, there = batches("cpu"), batches("cuda")
    made, _ = there.make(1)
    assert all(tensor.is_pinned() for tensor in made.values())
    with there.prefetch(3, 1, 60):
        for step in range(1, 61):
            busy = torch.randn(4096, 4096, device="cuda")
            busy = busy @ busy  # so that copies are under way while the next ones are made
            for ours, theirs in zip(there.microbatches(step), here.microbatches(step), strict=True):
                assert torch.equal(ours.labels.cpu(), theirs.labels)
                assert all(torch.equal(ours.inputs[name].cpu(), value) for name, value in theirs.inputs.items())
