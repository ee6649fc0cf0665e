"""GPT-OSS: the blocks of Llama with attention sinks and experts.

Shapes: T tokens, D model dimension, H heads.
"""

import torch
from torch import Tensor, nn

from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.llama.model import Attention, Block
from titanlike.models.moe.model import MoeLlama, build_feed_forward


class GptOss(MoeLlama):
    """A decoder of the GPT-OSS family."""

    config: GptOssConfig

    def build_block(self, index: int) -> nn.Module:
        """Returns a block with attention sinks and experts."""
        config = self.config
        attention = SinkAttention(config, config.sliding_window if config.is_local(index) else 0)
        return Block(config, index, build_feed_forward(config), attention)


class SinkAttention(Attention):
    """Attention with sinks, and with a bias of the output projection."""

    def __init__(self, config: GptOssConfig, window: int = 0) -> None:
        super().__init__(config, window)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim)
        self.sinks = Sinks(config.num_heads)


class Sinks(nn.Module):
    """A logit of each head, to which a token can attend in place of other tokens. It has no value: its probability is lost."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Returns the logits of this rank's heads (H,)."""
        return self.weight
