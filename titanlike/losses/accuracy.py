"""Loss and accuracy of masked tokens, for validation.

Shapes: N tokens, V vocabulary, or this rank's shard of it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.losses import IGNORE
from titanlike.losses.chunked import Logits, chunked_loss, first_token, reduced, slices
from titanlike.losses.cross_entropy import CrossEntropy, cross_entropy_inplace


@dataclass(frozen=True)
class LossAndAccuracy(CrossEntropy):
    """Returns (2,): the summed cross-entropy, and the number of labels that have the largest logit. Only tokens with a label have
    logits."""

    def __call__(self, logits: Logits, labels: Tensor, **options: Any) -> Tensor:
        is_label = labels != IGNORE
        logits, labels = replace(logits, x=logits.x[is_label]), labels[is_label]
        if not len(labels):
            return torch.zeros(2, device=labels.device)

        def compute(values: Tensor, rows: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
            correct = num_correct(values, labels[rows], self.vocab_group)
            loss, _ = cross_entropy_inplace(values, labels[rows], self.vocab_group, soft_cap=logits.soft_cap)
            return (loss, correct.float()), values

        sums = chunked_loss(logits, compute, slices(0, len(labels), self.chunk))
        return torch.stack([each for each in sums if each is not None])


def num_correct(logits: Tensor, labels: Tensor, vocab_group: dist.ProcessGroup | None) -> Tensor:
    """Returns the number of labels (N,) that have the largest of the logits (N, V)."""
    ids = labels - first_token(logits, vocab_group)
    is_local = (ids >= 0) & (ids < logits.shape[-1])
    label_logits = logits.gather(-1, ids.where(is_local, 0)[:, None])[:, 0].where(is_local, -torch.inf)
    label_logits, largest = (reduced(each, "max", vocab_group) for each in (label_logits, logits.amax(-1)))
    return (label_logits == largest).sum()
