"""The cross-entropy of logits that exist in full, as those of a float8 LM head do.

Shapes: B sequences, T tokens, N = B * T, V vocabulary, or this rank's shard of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.losses.cross_entropy import cross_entropy_inplace, scaled


def cross_entropy_of_logits(
    logits: Tensor,
    labels: Tensor,
    vocab_group: dist.ProcessGroup | None,
    z_loss: float | None,
    soft_cap: float,
    auxiliary: tuple[int, float] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns what `chunked_linear_cross_entropy` returns for logits (B, T, V) and labels (B, T), the z-loss in it, and the
    cross-entropy of the auxiliary sequences."""
    arguments = vocab_group, z_loss, soft_cap
    if auxiliary is None:
        loss, z_term = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), *arguments)
        return loss, z_term, None
    number, weight = auxiliary
    (loss, z_term), (of_rest, z_of_rest) = (
        _CrossEntropy.apply(logits[rows].flatten(0, -2), labels[rows].flatten(), *arguments)
        for rows in (slice(None, -number), slice(-number, None))
    )
    loss = loss + weight * (of_rest - of_rest.detach())
    return loss, z_term, of_rest.detach() if z_of_rest is None else of_rest.detach() - z_of_rest


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
    loss, _ = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocab_group, z_loss, soft_cap)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_group: dist.ProcessGroup | None,
        z_loss: float | None,
        soft_cap: float,
    ) -> tuple[Tensor, Tensor | None]:
        gradient = logits.clone()
        loss, z_term = cross_entropy_inplace(gradient, labels, vocab_group, z_loss, soft_cap)
        ctx.save_for_backward(gradient)
        if z_term is not None:
            ctx.mark_non_differentiable(z_term)
        return loss, z_term

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, scale, gradient.dtype), None, None, None, None
