"""OLMo-2 in plain PyTorch: the decoder of Llama with norms after attention and feed-forward.

Shapes: B sequences, T tokens, H query heads, K key/value heads, E head dimension.
"""

from torch import Tensor, nn

from titanlike.models.common.document_mask import Mask
from titanlike.models.llama.config import LlamaFamilyConfig
from titanlike.models.llama.model import Attention, Block, FeedForward, Llama


class Olmo2(Llama):
    """A decoder of the OLMo-2 family."""

    def build_block(self, index: int) -> nn.Module:
        """Returns a block with norms of outputs."""
        return Olmo2Block(self.config, Olmo2Attention(self.config), FeedForward(self.config, self.config.ffn_dim))


class Olmo2Block(Block):
    """A transformer block that normalizes what attention and feed-forward add to the residual stream."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        h = x + self.attention_norm(self.attention(x, rope, mask))
        return h + self.ffn_norm(self.feed_forward(h))


class Olmo2Attention(Attention):
    """Attention with an RMSNorm over all queries of a token, and one over all of its keys."""

    def __init__(self, config: LlamaFamilyConfig) -> None:
        super().__init__(config)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(number * config.head_dim, eps=config.norm_eps)
            for number in (config.num_heads, config.num_kv_heads)
        )

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q_norm(self.wq(x)), self.k_norm(self.wk(x)), self.wv(x)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        return q, k, v
