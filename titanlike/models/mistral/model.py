"""Mistral and Phi-3 in plain PyTorch: the decoder of Llama, with sliding-window attention in all blocks or in none."""

from torch import nn

from titanlike.models.common.layers import DotProductAttention
from titanlike.models.llama.model import Attention, Block, FeedForward, Llama


class Mistral(Llama):
    """A decoder of the Mistral or Phi-3 family."""

    def build_block(self, index: int) -> nn.Module:
        """Returns a block, with a window or without."""
        attention = Attention(self.config)
        attention.attend = DotProductAttention(window=self.config.sliding_window)
        return Block(self.config, attention, FeedForward(self.config, self.config.ffn_dim))
