"""Mixtral in plain PyTorch, and the base of other models with experts: Llama with a mixture of experts in place of each
feed-forward layer.

Shapes: B sequences, T tokens, D model dimension, E experts, V vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from titanlike.models.common.attention_inputs import AttentionInputs, attention_inputs
from titanlike.models.common.document_mask import Mask
from titanlike.models.common.experts import BalanceLoss, MixtureOfExperts
from titanlike.models.llama.model import Attention, Block, FeedForward, Llama
from titanlike.models.moe.config import MoeConfig


class MoeLlama(Llama):
    """A decoder of the Llama family with experts."""

    residual_outputs = (*Llama.residual_outputs, "experts.w2", "shared.w2.weight")
    config: MoeConfig

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        self.balance_loss = BalanceLoss(config) if config.balance_loss else None

    def build_block(self, index: int) -> nn.Module:
        """Returns a block with experts."""
        return MixtureBlock(self.config, self.build_attention(index), build_feed_forward(self.config))

    def build_attention(self, index: int) -> nn.Module:
        """Returns the attention of a block."""
        return Attention(self.config)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Any:
        """Returns what `Llama` returns.

        Args:
            counts: what the routers of previous pipeline stages have counted (B, 2, E). A stage returns it, too, with its own.
        """
        h = tokens if self.tok_embeddings is None else self.embed(tokens)  # (B, T, D)
        h, counts = self.run_blocks(h, counts, attention_inputs(self, tokens, position_ids, document_ids))
        if counts is None and self.balance_loss is not None and torch.is_grad_enabled():  # a stage of dense blocks
            counts = h.new_zeros((h.shape[0], 2, self.config.num_experts), dtype=torch.float32)
        h = h if self.norm is None else self.norm(h)
        if self.balance_loss is None or counts is None:
            return h if self.output is None else self.output(h, labels)
        if self.output is None:
            return h, counts
        out = self.output(h, labels)
        return out if labels is None else self.balance_loss(out, counts, labels)

    def run_blocks(
        self, h: Tensor, counts: Tensor | None, inputs: dict[str, AttentionInputs]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output of the blocks (B, T, D), and `counts` with what their routers have counted."""
        for name, layer in self.layers.items():
            if int(name) < self.config.num_layers:  # those that follow predict later tokens
                h, counts = add_counts(layer, layer(h, *inputs[name]), counts)
        return h, counts


class MixtureBlock(Block):
    """A transformer block that also returns what its router has counted, if it has."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Any:
        h = x + self.attention(self.attention_norm(x), rope, mask)
        out = self.feed_forward(self.ffn_norm(h))
        if not isinstance(out, tuple):
            return h + out
        out, counts = out
        # FSDP prefetches where the backward pass reaches an output. After this copy, both outputs are before the experts: else it
        # would gather them again.
        return h + out, counts.clone() if counts.requires_grad else counts


def build_feed_forward(config: MoeConfig) -> MixtureOfExperts:
    """Returns the experts of a block, with those that compute every token."""
    shared = FeedForward(config, config.num_shared_experts * config.ffn_dim) if config.num_shared_experts else None
    layer = MixtureOfExperts(config, shared)
    layer.router.counts_load = True  # for the metrics: `MoeLlama.run_blocks` takes the counts
    return layer


def add_counts(
    layer: nn.Module, out: Tensor | tuple[Tensor, Tensor], counts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the hidden states that a block has returned and, for the balance loss, `counts` with what its router has counted."""
    if not isinstance(out, tuple):
        return out, counts
    h, layer_counts = out
    cast(Any, layer).feed_forward.router.add_load(layer_counts)
    if layer_counts.shape[1] == 1:  # without a balance loss
        return h, counts
    return h, layer_counts if counts is None else counts + layer_counts
