"""The loss: a sum over valid tokens. Who calls it divides by the number of valid tokens in the whole batch."""

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a label that is not trained on


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over the valid tokens of (B, T), in float32 whatever the logits are."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def num_valid(labels: Tensor) -> Tensor:
    """How many tokens count."""
    return (labels != IGNORE).sum()
