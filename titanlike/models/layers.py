"""What both models are made of beside torch's own layers. Without parameters, and modules all the same: a transform can take
the place of either from outside.

Shapes: B sequences, T tokens, D width, H query heads, K key and value heads, E width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.noise import spread


class CausalAttention(nn.Module):
    """Each token sees those before it, and itself; with documents, only those of its own document."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Queries (B, H, T, E), keys and values (B, K, T, E), a number for each token's document (B, T)."""
        mask = None
        if documents is not None:
            places = torch.arange(q.shape[2], device=q.device)
            mask = visible(places, places, documents, documents)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )


def visible(seeing: Tensor, seen: Tensor, seeing_documents: Tensor, seen_documents: Tensor) -> Tensor:
    """Which of the places `seen` (S,) each of the places `seeing` (T,) may look at: (B, 1, T, S)."""
    same = seeing_documents[:, None, :, None] == seen_documents[:, None, None, :]
    return same & (seeing[:, None] >= seen[None, :])


class TiedHead(nn.Module):
    """The embedding's weight used once more, as the head."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = (embedding,)  # in a tuple, so that the weight has one name and not two

    @property
    def weight(self) -> Tensor:
        """That of the embedding."""
        return self.embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Dropout(nn.Module):
    """Zeroes a share of the stream, as a function of each token's own random number: of no state, no rank and no layout."""

    def __init__(self, share: float, site: int) -> None:
        super().__init__()
        self.share = share
        self.site = site  # another pattern at each place of the model

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """`noise` has 32 random bits for each token (B, T), as integers; without it nothing is dropped."""
        if noise is None or not self.share:
            return x
        channels = torch.arange(x.shape[-1], device=x.device)
        draws = spread(noise[..., None] + self.site * 0x9E3779B1 + channels * 0x85EBCA77)  # (B, T, D)
        return torch.where(draws >= int(self.share * 2**32), x / (1.0 - self.share), 0.0).to(x.dtype)
