"""The loss: a sum over valid tokens. Who calls it divides by the number of valid tokens in the whole batch."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

IGNORE = -100  # a label that is not trained on


def cross_entropy_sum(logits: Tensor, labels: Tensor, vocabulary: dist.ProcessGroup | None = None) -> Tensor:
    """Summed over the valid tokens of (B, T), in float32 whatever the logits are. Where a group of ranks shares the
    `vocabulary`, each gives its slice of the logits, and all get the same sum."""
    logits, labels = logits.float().flatten(0, -2), labels.flatten()  # (N, V), (N,)
    if vocabulary is None:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    largest = all_reduce(logits.detach().amax(-1), "max", vocabulary)
    logits = logits - largest[:, None]  # so that the exponentials do not overflow; it cancels out
    log_total = _Sum.apply(logits.exp().sum(-1), vocabulary).log()
    # A label's logit is in the slice of one rank; the others add nothing.
    places = labels - dist.get_rank(vocabulary) * logits.shape[-1]
    mine = (places >= 0) & (places < logits.shape[-1])
    label_logits = logits.gather(-1, places.where(mine, 0)[:, None])[:, 0].where(mine, 0.0)
    losses = log_total - _Sum.apply(label_logits, vocabulary)
    return losses.where(labels != IGNORE, 0.0).sum()


class _Sum(torch.autograd.Function):
    """A sum over ranks, each of which goes on to compute the same loss: a term's gradient is the sum's own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(tensor, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def num_valid(labels: Tensor) -> Tensor:
    """How many tokens count."""
    return (labels != IGNORE).sum()
