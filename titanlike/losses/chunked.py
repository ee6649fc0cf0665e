"""The cross-entropy of each token, for losses of whole sequences.

The weight of a token in such a loss is known once the sequences have been summed, in the backward pass. That pass computes the
logits of each chunk again: neither pass holds more than those of one.

Shapes: N tokens, D model dimension, V vocabulary, or this rank's shard of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.losses.cross_entropy import add_product, compiled, token_losses_inplace


def token_cross_entropies(
    x: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    chunk: int,
    vocab_group: dist.ProcessGroup | None,
    backend: str,
    soft_cap: float,
) -> Tensor:
    """Returns the cross-entropy of each token (B, T), in float32. The arguments are those of `chunked_linear_cross_entropy`."""
    rows = x.flatten(0, -2)
    losses: Tensor = _TokenLosses.apply(
        rows, weight, labels.flatten(), chunk or rows.shape[0], vocab_group, backend, soft_cap
    )
    return losses.view(labels.shape)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        chunk: int,
        vocab_group: dist.ProcessGroup | None,
        backend: str,
        soft_cap: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, labels)
        ctx.chunk, ctx.vocab_group, ctx.backend, ctx.soft_cap = chunk, vocab_group, backend, soft_cap
        compute_weight = None if weight is None else weight.to(x.dtype)
        losses = torch.zeros(x.shape[0], device=x.device)
        for first in range(0, x.shape[0], chunk):
            rows = slice(first, first + chunk)
            logits = x[rows].clone() if compute_weight is None else x[rows] @ compute_weight.t()
            found, _ = compiled(token_losses_inplace, backend)(logits, labels[rows], vocab_group, None, soft_cap)
            losses[rows] = found[:, 0]
            del logits, found  # before those of the next chunk are allocated
        return losses

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels = ctx.saved_tensors
        compute_weight = None if weight is None else weight.to(x.dtype)
        x_grad, weight_grad = torch.zeros_like(x), None
        if weight is not None and ctx.needs_input_grad[1]:
            # A sum of many chunks stops growing in bfloat16.
            dtype = torch.float32 if x.shape[0] > ctx.chunk else weight.dtype
            weight_grad = torch.zeros_like(weight, dtype=dtype)
        for first in range(0, x.shape[0], ctx.chunk):
            rows = slice(first, first + ctx.chunk)
            logits = x[rows].clone() if compute_weight is None else x[rows] @ compute_weight.t()
            compute = compiled(token_losses_inplace, ctx.backend)
            compute(logits, labels[rows], ctx.vocab_group, None, ctx.soft_cap, scale[rows])
            x_grad[rows] = (
                logits if compute_weight is None else logits @ compute_weight
            )  # `logits` holds its gradient now
            if weight_grad is not None:
                add_product(weight_grad, logits.t(), x[rows])
            del logits
        weight_grad = None if weight is None or weight_grad is None else weight_grad.to(weight.dtype)
        return x_grad, weight_grad, None, None, None, None, None
