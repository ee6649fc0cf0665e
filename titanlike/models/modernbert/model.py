"""ModernBERT in plain PyTorch: an encoder with the attention of Llama.

Shapes: B sequences, T tokens, D model dimension, V vocabulary.
"""

import math
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.bert.model import layer_norm
from titanlike.models.common.attention_inputs import attention_inputs
from titanlike.models.common.document_mask import DocumentMask, Mask
from titanlike.models.common.init import fill
from titanlike.models.common.layers import DotProductAttention, TiedLMHead
from titanlike.models.llama.model import Attention
from titanlike.models.modernbert.config import ModernBertConfig


class ModernBert(nn.Module):
    """A ModernBERT encoder with its head for masked tokens. Modules that are None and deleted blocks are skipped, so that a
    pipeline stage runs."""

    first_stage_modules: ClassVar[tuple[str, ...]] = ("tok_embeddings", "embedding_norm")
    last_stage_modules: ClassVar[tuple[str, ...]] = ("norm", "transform", "transform_norm", "output")

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        self.tensor_plan = config.tensor_plan()
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.embedding_norm: nn.Module | None = layer_norm(config)
        self.document_mask = DocumentMask(causal=False)
        self.local_mask = DocumentMask(window=config.sliding_window, causal=False)
        # A ModuleDict, not a ModuleList: names must survive when a pipeline stage deletes the blocks of other stages.
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.num_layers)})
        self.norm: nn.Module | None = layer_norm(config)
        # Tensor-parallel ranks replicate what transforms the input of the decoder, and compute their tokens.
        self.transform: nn.Module | None = nn.Linear(config.dim, config.dim, bias=False)
        self.transform_norm: nn.Module | None = layer_norm(config)
        self.output: nn.Module | None = TiedLMHead(self.tok_embeddings, bias=True)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (B, T, V) for tokens (B, T), or the loss summed over the valid `labels` (B, T).

        Args:
            position_ids: positions (B, T) or (1, T). Default: 0, 1, ... in each sequence.
            document_ids: the document of each token (B, T); attention does not cross documents. Default: one document.
        """
        h = tokens
        if self.tok_embeddings is not None and self.embedding_norm is not None:
            h = self.embedding_norm(self.tok_embeddings(tokens))  # (B, T, D)
        inputs = attention_inputs(self, tokens, position_ids, document_ids)
        for name, layer in self.layers.items():
            h = layer(h, *inputs[name])
        h = self.norm(h) if self.norm is not None else h
        if self.transform is not None and self.transform_norm is not None:
            h = self.transform_norm(F.gelu(self.transform(h)))
        return self.output(h, labels) if self.output is not None else h

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value."""
        # Scale down what each block adds to the residual stream, so that its variance does not grow with depth.
        residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        fill(name, value, 0.02 / (math.sqrt(2 * self.config.num_layers) if residual else 1.0), generator)


class Block(nn.Module):
    """A pre-norm transformer block. The first one has no norm before attention: its input is normalized."""

    def __init__(self, config: ModernBertConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = layer_norm(config) if index else None
        self.attention = Attention(cast(Any, config))
        window = config.sliding_window if config.is_local(index) else 0
        self.attention.attend = DotProductAttention(window=window, causal=False)
        self.ffn_norm = layer_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        h = x + self.attention(x if self.attention_norm is None else self.attention_norm(x), rope, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class FeedForward(nn.Module):
    """A feed-forward layer with a gate of GELU, not in the tanh approximation."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))
