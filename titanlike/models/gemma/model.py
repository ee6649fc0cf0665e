"""Gemma 2 and 3 in plain PyTorch: the decoder of Llama with norms before and after attention and feed-forward. Most blocks have
sliding-window attention.

Shapes: B sequences, T tokens, D model dimension, H query heads, K key/value heads, E head dimension.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.common.document_mask import DocumentMask, Mask
from titanlike.models.common.layers import DotProductAttention, UnitOffsetRMSNorm
from titanlike.models.common.rope import apply_rope
from titanlike.models.gemma.config import Gemma3Config, GemmaConfig
from titanlike.models.llama.model import Attention, FeedForward, Llama


class Gemma(Llama):
    """A decoder of the Gemma family."""

    config: GemmaConfig

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__(config)
        always = config.attention_soft_cap > 0  # soft-capped scores have no causal kernel
        self.document_mask = DocumentMask(always=always)
        self.local_mask = DocumentMask(window=config.sliding_window, always=always)
        self.norm = norm(config, config.dim)
        cast(Any, self.output).soft_cap = config.logit_soft_cap

    def build_block(self, index: int) -> nn.Module:
        """Returns a block, with sliding-window attention or without."""
        return GemmaBlock(self.config, index)

    def embed(self, tokens: Tensor) -> Tensor:
        h = super().embed(tokens)
        # Rounded to the dtype of the activations, as published models were trained.
        return h * torch.tensor(self.config.dim**0.5, dtype=h.dtype)

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value."""
        if name.endswith("norm.weight"):
            value.zero_()
        else:
            super().init_parameter(name, value, generator)


class GemmaBlock(nn.Module):
    """A transformer block: what attention and feed-forward add to the residual stream is normalized, as is what they read."""

    def __init__(self, config: GemmaConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = norm(config, config.dim)
        self.attention = GemmaAttention(config, config.sliding_window if config.is_local(index) else 0)
        self.post_attention_norm = norm(config, config.dim)
        self.ffn_norm = norm(config, config.dim)
        self.feed_forward = GemmaFeedForward(config, config.ffn_dim)
        self.post_ffn_norm = norm(config, config.dim)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        h = x + self.post_attention_norm(self.attention(self.attention_norm(x), rope, mask))
        return h + self.post_ffn_norm(self.feed_forward(self.ffn_norm(h)))


class GemmaAttention(Attention):
    """Attention with a scale of its own, soft-capped scores (Gemma 2) or norms of queries and keys (Gemma 3)."""

    def __init__(self, config: GemmaConfig, window: int) -> None:
        super().__init__(config)
        self.query_scale = config.query_scale
        self.q_norm, self.k_norm = (
            norm(config, config.head_dim) if isinstance(config, Gemma3Config) else None for _ in range(2)
        )
        self.attend = DotProductAttention(soft_cap=config.attention_soft_cap, window=window)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        q, k, v = self.heads(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        heads = (each.transpose(1, 2) for each in (apply_rope(q, rope, self.query_scale), apply_rope(k, rope), v))
        h = self.attend(*heads, mask)  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)


class GemmaFeedForward(FeedForward):
    """A feed-forward layer with a gate of GELU in the tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


def norm(config: GemmaConfig, size: int) -> nn.RMSNorm:
    """Returns the norm of the architecture."""
    return UnitOffsetRMSNorm(size, eps=config.norm_eps)
