"""Dropout of the models that have it."""

import torch
from torch import Tensor, nn

from titanlike.utils.counter_rng import hash_u32


class Dropout(nn.Module):
    """Dropout from counter-based random numbers: a function of the token's bits, the site and the channel, not of a generator.

    Recomputation and every parallel layout drop the same elements.
    """

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site  # decorrelates the layers of a model

    def forward(self, x: Tensor, bits: Tensor | None) -> Tensor:
        """Drops elements of x (B, T, D). `bits` holds 32 random bits for each token (B, T); None disables dropout."""
        if bits is None or not self.p:
            return x
        channels = torch.arange(x.shape[-1], device=x.device)
        draws = hash_u32(bits[..., None] + self.site * 0x9E3779B1 + channels * 0x85EBCA77)  # (B, T, D)
        return torch.where(draws >= int(self.p * 2**32), x / (1.0 - self.p), 0.0).to(x.dtype)
