"""Llama with a mixture of experts in place of each feed-forward layer: Qwen3-MoE and Mixtral."""

from torch import nn

from titanlike.models.common.experts import BalanceLoss, MixtureOfExperts
from titanlike.models.llama.model import Block, FeedForward, Llama
from titanlike.models.moe.config import MoeConfig


class MoeLlama(Llama):
    """A decoder of the Llama family with experts."""

    config: MoeConfig

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        self.balance_loss = BalanceLoss(config) if config.balance_loss else None

    def build_block(self, index: int) -> nn.Module:
        """Returns a block with experts."""
        return Block(self.config, index, build_feed_forward(self.config))


def build_feed_forward(config: MoeConfig) -> MixtureOfExperts:
    """Returns the experts of a block, with those that compute every token."""
    shared = FeedForward(config, config.num_shared_experts * config.ffn_dim) if config.num_shared_experts else None
    layer = MixtureOfExperts(config, shared)
    layer.router.counts_load = True  # for the metrics: `Llama.run_blocks` takes the counts
    return layer
