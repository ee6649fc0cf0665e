"""Llama in plain PyTorch.

Shapes: B sequences, T tokens, D model dimension, H query heads, K key/value heads, E head dimension, V vocabulary.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.common.attention_inputs import attention_inputs
from titanlike.models.common.document_mask import DocumentMask, Mask
from titanlike.models.common.init import fill
from titanlike.models.common.layers import DotProductAttention, LMHead, TiedLMHead
from titanlike.models.common.rope import apply_rope
from titanlike.models.llama.config import LlamaFamilyConfig


class Llama(nn.Module):
    """A decoder. Modules that are None and deleted blocks are skipped, so that a pipeline stage runs."""

    first_stage_modules: ClassVar[tuple[str, ...]] = ("tok_embeddings",)
    last_stage_modules: ClassVar[tuple[str, ...]] = ("norm", "output")
    residual_outputs: ClassVar[tuple[str, ...]] = ("attention.wo.weight", "feed_forward.w2.weight")
    """Ends of the names of matrices whose products are added to the residual stream."""

    def __init__(self, config: LlamaFamilyConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.document_mask, self.local_mask = DocumentMask(), DocumentMask(window=config.sliding_window)
        # A ModuleDict, not a ModuleList: names must survive when a pipeline stage deletes the blocks of other stages.
        self.layers = nn.ModuleDict({str(i): self.build_block(i) for i in range(config.num_layers)})
        self.norm: nn.Module | None = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Module | None = (
            TiedLMHead(self.tok_embeddings) if config.tied_head else LMHead(config.dim, config.vocab_size)
        )

    @property
    def tensor_plan(self) -> dict[str, str]:
        """The tensor-parallel style of each submodule."""
        return self.config.tensor_plan(map(int, self.layers))

    def build_block(self, index: int) -> nn.Module:
        """Returns a block of the architecture."""
        return Block(self.config, Attention(self.config), FeedForward(self.config, self.config.ffn_dim))

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Returns logits (B, T, V) for tokens (B, T), or the loss summed over the valid `labels` (B, T).

        Args:
            position_ids: positions (B, T) or (1, T). Default: 0, 1, ... in each sequence.
            document_ids: the document of each token (B, T); attention does not cross documents. Default: one document.
        """
        h = tokens if self.tok_embeddings is None else self.embed(tokens)  # (B, T, D)
        inputs = attention_inputs(self, tokens, position_ids, document_ids)
        for name, layer in self.layers.items():
            h = layer(h, *inputs[name])
        h = h if self.norm is None else self.norm(h)
        return h if self.output is None else self.output(h, labels)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the hidden states (B, T, D) that the first block reads."""
        assert self.tok_embeddings is not None
        return self.tok_embeddings(tokens)

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value."""
        # Scale down what each block adds to the residual stream, so that its variance does not grow with depth.
        std = 0.02 / math.sqrt(2 * self.config.num_layers) if name.endswith(self.residual_outputs) else 0.02
        fill(name, value, std, generator)


class Block(nn.Module):
    """A pre-norm transformer block: attention and feed-forward, each with a residual connection."""

    def __init__(self, config: LlamaFamilyConfig, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Any:
        h = x + self.attention(self.attention_norm(x), rope, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Attention(nn.Module):
    """Grouped-query attention with rotary position embeddings."""

    def __init__(self, config: LlamaFamilyConfig, *, bias: bool = False) -> None:
        """`bias`: whether the projections of queries, keys and values have one."""
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=bias)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=bias)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=bias)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.attend = DotProductAttention()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        q, k, v = self.heads(x)
        heads = (each.transpose(1, 2) for each in (apply_rope(q, rope), apply_rope(k, rope), v))
        h = self.attend(*heads, mask)  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, T, H, E), keys and values (B, T, K, E)."""
        # Take the number of heads from the projections: under tensor parallelism a rank has only some of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return q, k, v


class FeedForward(nn.Module):
    """A feed-forward layer with a gate: SwiGLU."""

    def __init__(self, config: Any, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
