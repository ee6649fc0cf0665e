"""Cross-entropy, summed over valid tokens. The caller divides by the number of valid tokens in the global batch.

The gradient of the logits is computed together with the loss, in place: neither the logits nor the probabilities (N, V) are kept
for the backward pass, and `chunked_linear_cross_entropy` holds them for one chunk of tokens at a time.

Shapes: N tokens, D model dimension, V vocabulary, or this rank's shard of it.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

IGNORE = -100  # label of a token that does not contribute to the loss


def cross_entropy_sum(logits: Tensor, labels: Tensor, vocab_group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns the cross-entropy of logits (B, T, V), summed over the valid labels (B, T), in float32.

    If the ranks of `vocab_group` share the vocabulary, each passes its shard of the logits, and all get the full sum.
    """
    return _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocab_group)


def chunked_linear_cross_entropy(
    x: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    *,
    chunk: int = 0,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str = "",
) -> Tensor:
    """Returns the summed cross-entropy of the logits `x @ weight.T`, computed for `chunk` tokens at a time.

    Args:
        x: hidden states (B, T, D), or the logits (B, T, V) if `weight` is None.
        weight: output projection (V, D).
        chunk: tokens whose logits exist at the same time; 0: all.
        vocab_group: ranks that share the vocabulary.
        backend: `torch.compile` backend for everything but the matmuls; empty: eager.
    """
    if weight is None:
        return cross_entropy_sum(x, labels, vocab_group)
    x, labels = x.flatten(0, -2), labels.flatten()
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _ChunkedLinearCrossEntropy.apply(x, weight, labels, chunk or x.shape[0], vocab_group, backend, needs_grad)


def cross_entropy_inplace(logits: Tensor, labels: Tensor, vocab_group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns the summed loss of logits (N, V) and overwrites them with their gradient."""
    valid = labels != IGNORE
    largest = logits.amax(-1, keepdim=True)  # for numerical stability; it cancels out
    label_ids = labels.where(valid, 0)[:, None]
    local = valid[:, None]
    if vocab_group is not None:
        largest = all_reduce(largest, "max", vocab_group)
        # A label lies in the vocabulary shard of one rank; the other ranks contribute zero.
        label_ids = label_ids - dist.get_rank(vocab_group) * logits.shape[-1]
        local = local & (label_ids >= 0) & (label_ids < logits.shape[-1])
        label_ids = label_ids.where(local, 0)
    label_logits = (logits.gather(-1, label_ids).float() - largest).where(local, 0.0)
    # Compiled, each of three passes recomputes what it needs and the last one writes in place; in eager mode every
    # operation works in place.
    compiling = torch.compiler.is_compiling()
    probs = (logits.float() - largest).exp() if compiling else logits.float().sub_(largest).exp_()
    total = probs.sum(-1, keepdim=True)
    if vocab_group is not None:
        total, label_logits = (all_reduce(term, "sum", vocab_group) for term in (total, label_logits))
    losses = (total.log() - label_logits).where(valid[:, None], 0.0)
    if compiling:
        vocab = torch.arange(logits.shape[-1], device=logits.device)
        probs = (logits.float() - (largest + total.log())).exp().where(valid[:, None], 0.0)
        logits.copy_(probs - ((vocab == label_ids) & local).float())
    else:
        logits.copy_(probs.mul_(valid[:, None] / total).scatter_add_(-1, label_ids, -local.float()))
    return losses.sum()


def num_valid(labels: Tensor) -> Tensor:
    """Returns the number of labels that contribute to the loss."""
    return (labels != IGNORE).sum()


def scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Multiplies in float32 and rounds once: the scale must not be rounded to the gradient's dtype first."""
    return (gradient.float() * scale).to(gradient.dtype)


@cache
def compiled(function: Any, backend: str) -> Any:
    """Returns the compiled function, or the function itself if there is no backend."""
    return torch.compile(function, backend=backend, fullgraph=True) if backend else function


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_group: dist.ProcessGroup | None) -> Tensor:
        gradient = logits.clone()
        loss = cross_entropy_inplace(gradient, labels, vocab_group)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, scale), None, None


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        vocab_group: dist.ProcessGroup | None,
        backend: str,
        needs_grad: bool,
    ) -> Tensor:
        ctx.backend = backend
        total = torch.zeros((), device=x.device)
        # Allocate what is kept before the first logits, which come and go: this avoids fragmentation.
        x_grad, weight_grad = (torch.zeros_like(of) if needs_grad else of for of in (x, weight))
        for first in range(0, x.shape[0], chunk):
            rows = slice(first, first + chunk)
            logits = x[rows] @ weight.t()
            total += compiled(cross_entropy_inplace, backend)(logits, labels[rows], vocab_group)
            if needs_grad:
                x_grad[rows] = logits @ weight  # `logits` holds its gradient now
                weight_grad.addmm_(logits.t(), x[rows])
            del logits  # before those of the next chunk are allocated
        if needs_grad:
            ctx.save_for_backward(x_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a pipeline schedule that splits the backward pass calls this twice.
        x_grad, weight_grad = ctx.saved_tensors
        backend = "" if x_grad.dtype == torch.float32 else ctx.backend  # compile where there is more than one operation
        x_grad, weight_grad = (compiled(scaled, backend)(saved, scale) for saved in (x_grad, weight_grad))
        return x_grad, weight_grad, None, None, None, None, None
