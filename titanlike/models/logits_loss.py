"""The cross-entropy of logits that exist in full, as those of a float8 LM head do.

Shapes: B sequences, T tokens, N = B * T, V vocabulary, or this rank's shard of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.models.loss import cross_entropy_inplace, scaled


def cross_entropy_of_logits(
    logits: Tensor,
    labels: Tensor,
    vocab_group: dist.ProcessGroup | None,
    z_loss: float | None,
    soft_cap: float,
    auxiliary: tuple[int, float] | None,
) -> Tensor:
    """Returns what `chunked_linear_cross_entropy` returns for logits (B, T, V) and labels (B, T)."""
    if auxiliary is None:
        return cross_entropy_sum(logits, labels, vocab_group, z_loss=z_loss, soft_cap=soft_cap)
    number, weight = auxiliary
    loss, of_rest = (
        cross_entropy_sum(logits[rows], labels[rows], vocab_group, z_loss=z_loss, soft_cap=soft_cap)
        for rows in (slice(None, -number), slice(-number, None))
    )
    return loss + weight * (of_rest - of_rest.detach())


def cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    vocab_group: dist.ProcessGroup | None = None,
    *,
    z_loss: float | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Returns the cross-entropy of logits (B, T, V), summed over the valid labels (B, T), in float32.

    If the ranks of `vocab_group` share the vocabulary, each passes its shard of the logits, and all get the full sum. `z_loss` is
    the coefficient of the squared log-sum-exp of each token's logits, which is added. `soft_cap` bounds the logits; 0: no bound.
    """
    return _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocab_group, z_loss, soft_cap)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_group: dist.ProcessGroup | None,
        z_loss: float | None,
        soft_cap: float,
    ) -> Tensor:
        gradient = logits.clone()
        loss = cross_entropy_inplace(gradient, labels, vocab_group, z_loss, soft_cap)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, scale, gradient.dtype), None, None, None, None
