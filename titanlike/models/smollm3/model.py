"""SmolLM3 in plain PyTorch: the decoder of Llama, in which some blocks have no rotary embeddings.

Shapes: B sequences, T tokens, D model dimension, H query heads, E head dimension.
"""

from torch import Tensor, nn

from titanlike.models.common.document_mask import Mask
from titanlike.models.llama.model import Attention, Block, FeedForward, Llama
from titanlike.models.smollm3.config import SmolLM3Config


class SmolLM3(Llama):
    """A decoder of the SmolLM3 family."""

    config: SmolLM3Config

    def build_block(self, index: int) -> nn.Module:
        """Returns a block, with rotary embeddings or without."""
        attention_class = Attention if self.config.has_rope(index) else UnrotatedAttention
        return Block(self.config, attention_class(self.config), FeedForward(self.config, self.config.ffn_dim))


class UnrotatedAttention(Attention):
    """Attention that knows the order of tokens by its mask only."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        h = self.attend(*(each.transpose(1, 2) for each in self.heads(x)), mask)  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)
