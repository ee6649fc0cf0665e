"""Loss and accuracy of masked tokens, for validation.

Shapes: N tokens, D model dimension, V vocabulary, or this rank's shard of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.losses.logits_loss import cross_entropy_sum
from titanlike.losses.cross_entropy import IGNORE, HeadLoss
from titanlike.utils.compat import all_reduce
from titanlike.utils.modules import without_owner


class LossAndAccuracy(HeadLoss):
    """Returns (2,): the summed cross-entropy, and the number of labels that have the largest logit. Only tokens with a label have
    logits."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        soft_cap: float,
        bias: Tensor | None = None,
        auxiliary: tuple[int, float] | None = None,
    ) -> Tensor:
        assert auxiliary is None  # validation has none
        is_label = labels != IGNORE
        x, labels = x[is_label], labels[is_label]
        chunk = self.chunk or max(len(x), 1)
        total = torch.zeros(2, device=x.device)
        for first in range(0, len(x), chunk):
            rows = slice(first, first + chunk)
            logits = x[rows] if weight is None else x[rows] @ weight.to(x.dtype).t()
            logits = logits if bias is None else logits + bias.to(logits.dtype)
            total[0] += cross_entropy_sum(logits, labels[rows], self.vocab_group, soft_cap=soft_cap)
            total[1] += num_correct(logits, labels[rows], self.vocab_group)
        return total


def num_correct(logits: Tensor, labels: Tensor, vocab_group: dist.ProcessGroup | None) -> Tensor:
    """Returns the number of labels (N,) that have the largest of the logits (N, V)."""
    rank = 0 if vocab_group is None else dist.get_rank(vocab_group)
    ids = labels - rank * logits.shape[-1]
    is_local = (ids >= 0) & (ids < logits.shape[-1])
    of_label = logits.gather(-1, ids.where(is_local, 0)[:, None])[:, 0].where(is_local, -torch.inf)
    largest = logits.amax(-1)
    if vocab_group is not None:
        of_label, largest = (all_reduce(each, "max", vocab_group) for each in (of_label, largest))
    return (of_label == largest).sum()


@contextmanager
def loss_and_accuracy(model: nn.Module) -> Iterator[None]:
    """Has a model return `LossAndAccuracy` for labels in this context."""
    head: Any = getattr(model, "output", None)  # only of the last pipeline stage
    if head is None:
        yield
        return
    head = without_owner(head)
    loss = head.loss
    head.loss = LossAndAccuracy(chunk=loss.chunk, vocab_group=loss.vocab_group)
    try:
        yield
    finally:
        head.loss = loss
