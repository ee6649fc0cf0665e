"""What both models are made of beside torch's own layers. Without parameters, and modules all the same: a transform can take
the place of either from outside.

Shapes: B sequences, T tokens, D width, H query heads, K key and value heads, E width of a head.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlike.models.loss import chunked_linear_cross_entropy
from titanlike.utils.counter_rng import spread

# Of attention, the fastest first.
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

# Of the stream (B, T, D), the head's weight (V, D) and labels (B, T).
LossOf = Callable[[Tensor, Tensor | None, Tensor], Tensor]


class CausalAttention(nn.Module):
    """Each token sees those before it, and itself; with documents, only those of its own document."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Queries (B, H, T, E), keys and values (B, K, T, E), a number for each token's document (B, T)."""
        mask = None
        if document_ids is not None:
            places = torch.arange(q.shape[2], device=q.device)
            mask = document_causal_mask(places, places, document_ids, document_ids)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )


def document_causal_mask(seeing: Tensor, seen: Tensor, query_document_ids: Tensor, key_document_ids: Tensor) -> Tensor:
    """Which of the places `seen` (S,) each of the places `seeing` (T,) may look at: (B, 1, T, S)."""
    same = query_document_ids[:, None, :, None] == key_document_ids[:, None, None, :]
    return same & (seeing[:, None] >= seen[None, :])


def attention_backend(kernel: str) -> AbstractContextManager[Any]:
    """Which kernel of torch's `CausalAttention` takes in here: one by name, or with `auto` the first that can do it."""
    names = list(KERNELS) if kernel == "auto" else [kernel]
    return sdpa_kernel([KERNELS[name] for name in names], set_priority=True)


class Embedding(nn.Embedding):
    """torch's own, but that on the meta device, where there are no values, it draws none: that imports the compiler."""

    def reset_parameters(self) -> None:
        """Draw values, where there is memory for them."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Head(nn.Linear):
    """The last matrix. Given labels, it gives their summed loss in place of logits, which then need never be there at once."""

    loss: LossOf = staticmethod(chunked_linear_cross_entropy)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x) if labels is None else self.loss(x, self.weight, labels)


class TiedHead(nn.Module):
    """The embedding's weight used once more, as the head."""

    loss: LossOf = staticmethod(chunked_linear_cross_entropy)

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = (embedding,)  # in a tuple, so that the weight has one name and not two

    @property
    def weight(self) -> Tensor:
        """That of the embedding."""
        return self.embedding[0].weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        weight = self.weight.to(x.dtype)
        return F.linear(x, weight) if labels is None else self.loss(x, weight, labels)


class Dropout(nn.Module):
    """Zeroes a share of the stream, as a function of each token's own random number: of no state, no rank and no layout."""

    def __init__(self, share: float, site: int) -> None:
        super().__init__()
        self.share = share
        self.site = site  # another pattern at each place of the model

    def forward(self, x: Tensor, dropout_bits: Tensor | None) -> Tensor:
        """`noise` has 32 random bits for each token (B, T), as integers; without it nothing is dropped."""
        if dropout_bits is None or not self.share:
            return x
        channels = torch.arange(x.shape[-1], device=x.device)
        draws = spread(dropout_bits[..., None] + self.site * 0x9E3779B1 + channels * 0x85EBCA77)  # (B, T, D)
        return torch.where(draws >= int(self.share * 2**32), x / (1.0 - self.share), 0.0).to(x.dtype)
