"""Multi-token prediction of DeepSeek-V3: further blocks, each of which predicts one token further ahead from the hidden states of
the one before it, with the embedding and the LM head of the model.

Shapes: B sequences, T tokens, D model dimension, N further tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from titanlike.models.common.attention_inputs import attention_inputs
from titanlike.models.common.document_mask import Mask
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.moe.model import MixtureBlock, add_counts


class MultiTokenBlock(MixtureBlock):
    """A block whose input is computed from hidden states and from the embedding of a later token. Its output is normalized, for the
    LM head and for the next of these blocks."""

    def __init__(self, config: DeepseekV3Config, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__(config, attention, feed_forward)
        self.enorm, self.hnorm, self.head_norm = (nn.RMSNorm(config.dim, eps=config.norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.dim, config.dim, bias=False)

    def forward(  # type: ignore[override]
        self, h: Tensor, embedding: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        # The embedding first, as in the published weights.
        x = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(h)), dim=-1))  # (B, T, D)
        out = super().forward(x, rope, mask)
        if isinstance(out, tuple):
            return self.head_norm(out[0]), out[1]
        return self.head_norm(out)


def multi_token_loss(
    model: Any,
    tokens: Tensor,
    labels: Tensor,
    next_tokens: Tensor,
    next_labels: Tensor,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
) -> Tensor:
    """Returns the loss of a `Deepseek` for labels (B, T), with the gradient of the losses of further tokens.

    Args:
        next_tokens: the tokens that follow each token (B, T, N).
        next_labels: the labels of further tokens (B, T, N).
    """
    config: DeepseekV3Config = model.config
    number = config.num_mtp_layers
    # The embedding and the LM head are each called once, with more sequences, so that FSDP reduces their gradients once.
    h, *embeddings = model.tok_embeddings(torch.cat((tokens, *next_tokens.unbind(-1)))).chunk(1 + number)
    inputs = attention_inputs(model, tokens, position_ids, document_ids)
    h, counts = model.run_blocks(h, None, inputs)
    states = [model.norm(h)]
    for i, embedding in enumerate(embeddings):
        name = str(config.num_layers + i)
        layer = model.layers[name]
        h, counts = add_counts(layer, layer(states[-1], embedding, *inputs[name]), counts)
        states.append(h)
    num_sequences = number * labels.shape[0]
    auxiliary = (num_sequences, config.mtp_loss_weight / number)
    loss = model.output(torch.cat(states), torch.cat((labels, *next_labels.unbind(-1))), auxiliary=auxiliary)
    return loss if counts is None or model.balance_loss is None else model.balance_loss(loss, counts, labels)
