"""BERT in plain PyTorch.

Shapes: B sequences, T tokens, D model dimension, V vocabulary.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.bert.config import BertConfig, EncoderConfig
from titanlike.models.common.document_mask import DocumentMask, Mask
from titanlike.models.common.dropout import Dropout
from titanlike.models.common.init import fill
from titanlike.models.common.layers import TiedLMHead
from titanlike.models.gpt.model import Attention


class Bert(nn.Module):
    """A BERT encoder with its head for masked tokens. Modules that are None and deleted blocks are skipped, so that a pipeline
    stage runs."""

    first_stage_modules: ClassVar[tuple[str, ...]] = (
        "tok_embeddings", "pos_embeddings", "type_embeddings", "embedding_norm",
    )  # fmt: skip
    last_stage_modules: ClassVar[tuple[str, ...]] = ("transform", "transform_norm", "output")

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tensor_plan = config.tensor_plan()
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embeddings: nn.Embedding | None = nn.Embedding(config.max_seq_len, config.dim)
        self.type_embeddings: nn.Embedding | None = nn.Embedding(config.num_token_types, config.dim)
        self.embedding_norm: nn.Module | None = layer_norm(config)
        self.dropout = Dropout(config.dropout, site=0)
        self.document_mask = DocumentMask(causal=False)
        # A ModuleDict, not a ModuleList: names must survive when a pipeline stage deletes the blocks of other stages.
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.num_layers)})
        # Tensor-parallel ranks replicate what transforms the input of the decoder, and compute their tokens.
        self.transform: nn.Module | None = nn.Linear(config.dim, config.dim)
        self.transform_norm: nn.Module | None = layer_norm(config)
        self.output: nn.Module | None = TiedLMHead(self.tok_embeddings, bias=True)

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
        if self.tok_embeddings is not None and self.pos_embeddings is not None and self.embedding_norm is not None:
            assert self.type_embeddings is not None
            if position_ids is None:
                position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
            h = self.tok_embeddings(tokens) + self.type_embeddings(torch.zeros_like(position_ids))  # (B, T, D)
            h = self.dropout(self.embedding_norm(h + self.pos_embeddings(position_ids)), dropout_bits)
        mask = self.document_mask(document_ids)  # once, for all blocks
        for layer in self.layers.values():
            h = layer(h, mask, dropout_bits)
        if self.transform is not None and self.transform_norm is not None:
            h = self.transform_norm(F.gelu(self.transform(h)))
        return self.output(h, labels) if self.output is not None else h

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value."""
        fill(name, value, 0.02, generator)


class Block(nn.Module):
    """A post-norm transformer block: the sum of attention or feed-forward and its input is normalized."""

    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = layer_norm(config)
        self.feed_forward = FeedForward(config)
        self.ffn_norm = layer_norm(config)
        self.attention_dropout = Dropout(config.dropout, site=2 * index + 1)
        self.ffn_dropout = Dropout(config.dropout, site=2 * index + 2)

    def forward(self, x: Tensor, mask: Mask | None = None, dropout_bits: Tensor | None = None) -> Tensor:
        h = self.attention_norm(x + self.attention_dropout(self.attention(x, mask), dropout_bits))
        return self.ffn_norm(h + self.ffn_dropout(self.feed_forward(h), dropout_bits))


class FeedForward(nn.Module):
    """A feed-forward layer with GELU, not in the tanh approximation."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim)
        self.w2 = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


def layer_norm(config: EncoderConfig) -> nn.LayerNorm:
    """Returns the norm of an architecture."""
    return nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.biases)
