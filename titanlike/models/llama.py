"""Llama 3 in plain PyTorch.

Shapes: B sequences, T tokens, D width, H query heads, K key and value heads, E width of a head.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.model_configs import LlamaConfig
from titanlike.models.layers import CausalAttention, Dropout, Embedding, Head, TiedHead

# How a tensor-parallel group shares each part, in the words of parallelisms/tensor.py. Every parameter is named.
TENSOR_PLAN = {
    "tok_embeddings": "vocab_parallel",
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
    "layers.*.feed_forward.w3": "colwise",
    "norm": "sequence_parallel",
    "output": "lm_head",
}


class Llama(nn.Module):
    """Tokens in, logits out. Any part may be absent, so that a slice of the model still runs."""

    tensor_plan: ClassVar[Mapping[str, str]] = TENSOR_PLAN
    first_stage_modules: ClassVar[tuple[str, ...]] = ("tok_embeddings",)
    last_stage_modules: ClassVar[tuple[str, ...]] = ("norm", "output")

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.shape = shape
        self.tok_embeddings: nn.Embedding | None = Embedding(shape.vocab_size, shape.dim)
        self.dropout = Dropout(shape.dropout, site=0)
        # A ModuleDict and not a ModuleList: names must survive when a pipeline stage deletes the blocks of others.
        self.layers = nn.ModuleDict({str(i): Block(shape, i) for i in range(shape.num_layers)})
        self.norm: nn.Module | None = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.output: nn.Module | None = (
            TiedHead(self.tok_embeddings) if shape.tied_head else Head(shape.dim, shape.vocab_size, bias=False)
        )

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
        if self.tok_embeddings is not None:
            h = self.dropout(self.tok_embeddings(tokens), dropout_bits)  # (B, T, D)
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rope = rotary_angles(self.shape, position_ids)
        for layer in self.layers.values():
            h = layer(h, rope, document_ids, dropout_bits)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h, labels) if self.output is not None else h

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fill one whole parameter with its initial value."""
        if name.endswith("norm.weight"):
            value.fill_(1.0)
            return
        std = 0.02
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
            # What each block adds to the residual stream: smaller the more blocks add to it.
            std /= math.sqrt(2 * self.shape.num_layers)
        value.normal_(0.0, std, generator=generator)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalized stream and added back to it."""

    def __init__(self, shape: LlamaConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)
        self.attention_dropout = Dropout(shape.dropout, site=2 * index + 1)
        self.ffn_dropout = Dropout(shape.dropout, site=2 * index + 2)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        document_ids: Tensor | None = None,
        dropout_bits: Tensor | None = None,
    ) -> Tensor:
        h = x + self.attention_dropout(self.attention(self.attention_norm(x), rope, document_ids), dropout_bits)
        return h + self.ffn_dropout(self.feed_forward(self.ffn_norm(h)), dropout_bits)


class Attention(nn.Module):
    """Causal attention with rotary positions; groups of query heads share a key and value head."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.num_heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.num_heads * shape.head_dim, shape.dim, bias=False)
        self.attend = CausalAttention()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], document_ids: Tensor | None = None) -> Tensor:
        # The numbers of tokens and of heads are read off the projections: x may be a slice of either.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = self.attend(rotate(q, rope), rotate(k, rope), v, document_ids)  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.w2 = nn.Linear(shape.ffn_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rotary_angles(shape: LlamaConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, 1, T, E) of each position's rotation (B, T), in float32: made anew in each pass, so there is no
    buffer to keep right."""
    exponents = torch.arange(0, shape.head_dim, 2, device=position_ids.device, dtype=torch.float32) / shape.head_dim
    frequencies = shape.rope_theta**-exponents  # (E/2,)
    if shape.rope_scaling != 1.0:
        frequencies = stretch(frequencies, shape.rope_scaling, shape.rope_original_seq_len)
    angles = position_ids.float()[:, None, :, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)  # (B, 1, T, E): the two halves of a head turn together
    return angles.cos(), angles.sin()


def stretch(frequencies: Tensor, factor: float, original_seq_len: int) -> Tensor:
    """Llama 3.1: slow the frequencies that turn less than once in the original length, keep those that turn four times."""
    turns = original_seq_len * frequencies / (2 * math.pi)
    keep = ((turns - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / factor)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (first half, second half) of a head by its position's angle, in float32."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)
