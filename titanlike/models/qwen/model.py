"""Qwen2 and Qwen3 in plain PyTorch: Llama with biases of queries, keys and values, or with norms of queries and keys. And Qwen3
with a mixture of experts.

Shapes: B sequences, T tokens, H query heads, K key/value heads, E head dimension.
"""

from torch import Tensor, nn

from titanlike.models.llama.config import LlamaFamilyConfig
from titanlike.models.llama.model import Attention, Block, FeedForward, Llama
from titanlike.models.moe.model import MoeLlama


class Qwen2(Llama):
    """A decoder of the Qwen2 family."""

    def build_block(self, index: int) -> nn.Module:
        """Returns a block with biases."""
        config = self.config
        return Block(config, Attention(config, bias=True), FeedForward(config, config.ffn_dim))


class Qwen3(Llama):
    """A decoder of the Qwen3 family."""

    def build_block(self, index: int) -> nn.Module:
        """Returns a block with norms of queries and keys."""
        config = self.config
        return Block(config, NormedAttention(config), FeedForward(config, config.ffn_dim))


class Qwen3Moe(MoeLlama):
    """A decoder of the Qwen3 family with experts."""

    def build_attention(self, index: int) -> nn.Module:
        """Returns attention with norms of queries and keys."""
        return NormedAttention(self.config)


class NormedAttention(Attention):
    """Attention with an RMSNorm over each head of queries and keys."""

    def __init__(self, config: LlamaFamilyConfig) -> None:
        super().__init__(config)
        self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, eps=config.norm_eps) for _ in range(2))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v
