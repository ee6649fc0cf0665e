"""Documents of random lengths, and the tokens of a context-parallel rank."""

import torch
from torch import Tensor


def documents(length: int, mean: int, batch: int = 2, seed: int = 0) -> Tensor:
    """Returns ids (B, T) of documents of random lengths."""
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 1 / mean
    return starts.cumsum(1)


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))
