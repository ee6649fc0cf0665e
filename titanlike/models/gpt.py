"""GPT-2 and GPT-3 in plain PyTorch.

Shapes: B sequences, T tokens, D width, H heads, E width of a head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config import models as shapes


class GPT(nn.Module):
    """Tokens in, logits out. Any part may be absent, so that a slice of the model still runs."""

    def __init__(self, shape: shapes.GPT) -> None:
        super().__init__()
        self.shape = shape
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(shape.vocab_size, shape.dim)
        self.pos_embeddings: nn.Embedding | None = nn.Embedding(shape.max_seq_len, shape.dim)
        # A ModuleDict and not a ModuleList: names must survive when a pipeline stage deletes the blocks of others.
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.num_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(shape.dim, eps=shape.norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocabulary) for tokens (B, T). `positions` (T,) counts from 0 unless given."""
        h = tokens
        if self.tok_embeddings is not None and self.pos_embeddings is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)
            h = self.tok_embeddings(tokens) + self.pos_embeddings(positions)  # (B, T, D)
        for layer in self.layers.values():
            h = layer(h)
        if self.norm is None:
            return h
        h = self.norm(h)
        # The head is the embedding: one weight, used at both ends.
        return F.linear(h, self.tok_embeddings.weight) if self.tok_embeddings is not None else h

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fill one whole parameter with its initial value."""
        if name.endswith("bias"):
            value.zero_()
        elif name.endswith("norm.weight"):
            value.fill_(1.0)
        else:
            # What each block adds to the residual stream: smaller the more blocks add to it.
            residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
            value.normal_(0.0, 0.02 / (math.sqrt(2 * self.shape.num_layers) if residual else 1.0), generator=generator)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalized stream and added back to it."""

    def __init__(self, shape: shapes.GPT) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.LayerNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Attention(nn.Module):
    """Causal attention. Three projections and not GPT-2's fused one: each can then be split by heads."""

    def __init__(self, shape: shapes.GPT) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim)
        self.wk = nn.Linear(shape.dim, shape.dim)
        self.wv = nn.Linear(shape.dim, shape.dim)
        self.wo = nn.Linear(shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        # The numbers of tokens and of heads are read off the projections: x may be a slice of either.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)


class FeedForward(nn.Module):
    """Two layers with GELU, in the tanh form that GPT-2 was trained with."""

    def __init__(self, shape: shapes.GPT) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, 4 * shape.dim)
        self.w2 = nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))
