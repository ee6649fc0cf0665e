"""The loss: a sum over valid tokens. Who calls it divides by the number of valid tokens in the whole batch.

Its gradient is simple, so it is found together with the loss: what takes the memory, a number for each token and word, is
never kept for the backward pass, and `chunked_linear_cross_entropy` has it for some tokens at a time.

Shapes: N tokens, D width, V words of the vocabulary, or of this rank's slice of it.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

IGNORE = -100  # a label that is not trained on


def cross_entropy_sum(logits: Tensor, labels: Tensor, vocab_group: dist.ProcessGroup | None = None) -> Tensor:
    """Summed over the valid tokens of (B, T), in float32 whatever the logits are. Where a group of ranks shares the
    `vocabulary`, each gives its slice of the logits, and all get the same sum."""
    return _OfLogits.apply(logits.flatten(0, -2), labels.flatten(), vocab_group)


def chunked_linear_cross_entropy(
    x: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    *,
    chunk: int = 0,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str = "",
) -> Tensor:
    """The same, of the logits that the head's weight (V, D) makes of the stream (B, T, D), so many tokens at a time; 0: all.
    What is not a matrix product is compiled by `backend`, if there is one. Without a weight, `x` has the logits already."""
    if weight is None:
        return cross_entropy_sum(x, labels, vocab_group)
    x, labels = x.flatten(0, -2), labels.flatten()
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _OfHead.apply(x, weight, labels, chunk or x.shape[0], vocab_group, backend, learning)


def cross_entropy_inplace(logits: Tensor, labels: Tensor, vocab_group: dist.ProcessGroup | None = None) -> Tensor:
    """The loss of logits (N, V), which become its gradient: there are never two of what takes so much memory."""
    valid = labels != IGNORE
    largest = logits.amax(-1, keepdim=True)  # so that the exponentials do not overflow; it cancels out
    places = labels.where(valid, 0)[:, None]
    mine = valid[:, None]
    if vocab_group is not None:
        largest = all_reduce(largest, "max", vocab_group)
        # A label is in the slice of one rank; the others add nothing.
        places = places - dist.get_rank(vocab_group) * logits.shape[-1]
        mine = mine & (places >= 0) & (places < logits.shape[-1])
        places = places.where(mine, 0)
    label_logits = (logits.gather(-1, places).float() - largest).where(mine, 0.0)
    # Compiled, each of three passes computes what it needs anew, and the last one writes in place; otherwise each step does.
    compiling = torch.compiler.is_compiling()
    odds = (logits.float() - largest).exp() if compiling else logits.float().sub_(largest).exp_()
    total = odds.sum(-1, keepdim=True)
    if vocab_group is not None:
        total, label_logits = (all_reduce(term, "sum", vocab_group) for term in (total, label_logits))
    losses = (total.log() - label_logits).where(valid[:, None], 0.0)
    if compiling:
        words = torch.arange(logits.shape[-1], device=logits.device)
        odds = (logits.float() - (largest + total.log())).exp().where(valid[:, None], 0.0)
        logits.copy_(odds - ((words == places) & mine).float())
    else:
        logits.copy_(odds.mul_(valid[:, None] / total).scatter_add_(-1, places, -mine.float()))
    return losses.sum()


def scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """In float32, and then rounded: the scale is the same for all, and must not be rounded itself."""
    return (gradient.float() * scale).to(gradient.dtype)


@cache
def compiled(function: Any, backend: str) -> Any:
    """The function, compiled if there is a backend."""
    return torch.compile(function, backend=backend, fullgraph=True) if backend else function


class _OfLogits(torch.autograd.Function):
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


class _OfHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        vocab_group: dist.ProcessGroup | None,
        backend: str,
        learning: bool,
    ) -> Tensor:
        ctx.backend = backend
        total = torch.zeros((), device=x.device)
        # What stays is there before the logits come and go: they leave no holes in memory.
        x_gradient, weight_gradient = (torch.zeros_like(of) if learning else of for of in (x, weight))
        for first in range(0, x.shape[0], chunk):
            piece = slice(first, first + chunk)
            gradient = x[piece] @ weight.t()  # the logits, as yet
            total += compiled(cross_entropy_inplace, backend)(gradient, labels[piece], vocab_group)
            if learning:
                x_gradient[piece] = gradient @ weight
                weight_gradient.addmm_(gradient.t(), x[piece])
            del gradient  # before the next piece's logits
        if learning:
            ctx.save_for_backward(x_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a pipeline that splits its backward pass comes here twice.
        x_gradient, weight_gradient = ctx.saved_tensors
        backend = "" if x_gradient.dtype == torch.float32 else ctx.backend  # where there is more than one operation
        x_gradient, weight_gradient = (
            compiled(scaled, backend)(saved, scale) for saved in (x_gradient, weight_gradient)
        )
        return x_gradient, weight_gradient, None, None, None, None, None


def num_valid(labels: Tensor) -> Tensor:
    """How many tokens count."""
    return (labels != IGNORE).sum()
