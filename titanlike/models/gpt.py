"""GPT-2 and GPT-3 in plain PyTorch.

Shapes: B sequences, T tokens, D width, H heads, E width of a head.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.model_configs import GPTConfig
from titanlike.models.layers import CausalAttention, Dropout, Embedding, TiedHead

# How a tensor-parallel group shares each part, in the words of parallelisms/tensor.py. Every parameter is named.
TENSOR_PLAN = {
    "tok_embeddings": "vocab_parallel",
    "pos_embeddings": "position_embedding",
    "layers.*.attention_norm": "sequence_parallel",
    "layers.*.attention": "all_gather_input",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence_parallel",
    "layers.*.feed_forward": "all_gather_input",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence_parallel",
    "output": "lm_head",
}


class GPT(nn.Module):
    """Tokens in, logits out. Any part may be absent, so that a slice of the model still runs."""

    tensor_plan: ClassVar[Mapping[str, str]] = TENSOR_PLAN
    first_stage_modules: ClassVar[tuple[str, ...]] = ("tok_embeddings", "pos_embeddings")
    last_stage_modules: ClassVar[tuple[str, ...]] = ("norm", "output")

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.shape = shape
        self.tok_embeddings: nn.Embedding | None = Embedding(shape.vocab_size, shape.dim)
        self.pos_embeddings: nn.Embedding | None = Embedding(shape.max_seq_len, shape.dim)
        self.dropout = Dropout(shape.dropout, site=0)
        # A ModuleDict and not a ModuleList: names must survive when a pipeline stage deletes the blocks of others.
        self.layers = nn.ModuleDict({str(i): Block(shape, i) for i in range(shape.num_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(shape.dim, eps=shape.norm_eps)
        self.output: nn.Module | None = TiedHead(self.tok_embeddings)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        dropout_bits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, vocabulary) for tokens (B, T), or the loss summed over `labels`. Of the same shape, each where it is
        wanted: `positions`, which count from 0 unless given; a number for each token's document; random bits for dropout."""
        h = tokens
        if self.tok_embeddings is not None and self.pos_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
            h = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(position_ids), dropout_bits)  # (B, T, D)
        for layer in self.layers.values():
            h = layer(h, document_ids, dropout_bits)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h, labels) if self.output is not None else h

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

    def __init__(self, shape: GPTConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.LayerNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)
        self.attention_dropout = Dropout(shape.dropout, site=2 * index + 1)
        self.ffn_dropout = Dropout(shape.dropout, site=2 * index + 2)

    def forward(self, x: Tensor, document_ids: Tensor | None = None, dropout_bits: Tensor | None = None) -> Tensor:
        h = x + self.attention_dropout(self.attention(self.attention_norm(x), document_ids), dropout_bits)
        return h + self.ffn_dropout(self.feed_forward(self.ffn_norm(h)), dropout_bits)


class Attention(nn.Module):
    """Causal attention. Three projections and not GPT-2's fused one: each can then be split by heads."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim)
        self.wk = nn.Linear(shape.dim, shape.dim)
        self.wv = nn.Linear(shape.dim, shape.dim)
        self.wo = nn.Linear(shape.dim, shape.dim)
        self.attend = CausalAttention()

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        # The numbers of tokens and of heads are read off the projections: x may be a slice of either.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = self.attend(q, k, v, document_ids)  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)


class FeedForward(nn.Module):
    """Two layers with GELU, in the tanh form that GPT-2 was trained with."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, 4 * shape.dim)
        self.w2 = nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))
