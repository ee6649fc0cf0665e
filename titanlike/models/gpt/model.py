"""GPT-2 and GPT-3 in plain PyTorch.

Shapes: B sequences, T tokens, D model dimension, H heads, E head dimension, V vocabulary.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.common.config import TransformerConfig
from titanlike.models.common.document_mask import DocumentMask, Mask
from titanlike.models.common.dropout import Dropout
from titanlike.models.common.init import fill
from titanlike.models.common.layers import DotProductAttention, TiedLMHead
from titanlike.models.gpt.config import GPTConfig


class GPT(nn.Module):
    """A GPT-2 decoder. Modules that are None and blocks that are deleted are skipped, so that a pipeline stage runs."""

    first_stage_modules: ClassVar[tuple[str, ...]] = ("tok_embeddings", "pos_embeddings")
    last_stage_modules: ClassVar[tuple[str, ...]] = ("norm", "output")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tensor_plan = config.tensor_plan()
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embeddings: nn.Embedding | None = nn.Embedding(config.max_seq_len, config.dim)
        self.dropout = Dropout(config.dropout, site=0)
        self.document_mask = DocumentMask()
        # A ModuleDict, not a ModuleList: names must survive when a pipeline stage deletes the blocks of other stages.
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.num_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Module | None = TiedLMHead(self.tok_embeddings)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        dropout_bits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (B, T, V) for tokens (B, T), or the loss summed over the valid `labels` (B, T).

        Args:
            position_ids: positions (B, T) or (1, T). Default: 0, 1, ... in each sequence.
            document_ids: the document of each token (B, T); attention does not cross documents. Default: one document.
            dropout_bits: 32 random bits for each token (B, T). Default: no dropout.
        """
        h = tokens
        if self.tok_embeddings is not None and self.pos_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
            h = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(position_ids), dropout_bits)  # (B, T, D)
        mask = self.document_mask(document_ids)  # once, for all blocks
        for layer in self.layers.values():
            h = layer(h, mask, dropout_bits)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h, labels) if self.output is not None else h

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value."""
        # Scale down what each block adds to the residual stream, so that its variance does not grow with depth.
        residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        fill(name, value, 0.02 / (math.sqrt(2 * self.config.num_layers) if residual else 1.0), generator)


class Block(nn.Module):
    """A pre-norm transformer block: attention and feed-forward, each with a residual connection."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.attention_dropout = Dropout(config.dropout, site=2 * index + 1)
        self.ffn_dropout = Dropout(config.dropout, site=2 * index + 2)

    def forward(self, x: Tensor, mask: Mask | None = None, dropout_bits: Tensor | None = None) -> Tensor:
        h = x + self.attention_dropout(self.attention(self.attention_norm(x), mask), dropout_bits)
        return h + self.ffn_dropout(self.feed_forward(self.ffn_norm(h)), dropout_bits)


class Attention(nn.Module):
    """Multi-head attention. Separate Q, K and V projections, unlike GPT-2's fused one: each can be split by heads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim)
        self.wk = nn.Linear(config.dim, config.dim)
        self.wv = nn.Linear(config.dim, config.dim)
        self.wo = nn.Linear(config.dim, config.dim)
        self.attend = DotProductAttention(causal=config.causal)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        # Take the number of heads from the projections: under tensor parallelism a rank has only some of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = self.attend(q, k, v, mask)  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)


class FeedForward(nn.Module):
    """A feed-forward layer with GELU in the tanh approximation, as GPT-2 was trained."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, 4 * config.dim)
        self.w2 = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))
