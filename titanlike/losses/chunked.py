"""Computes a loss of logits for a chunk of tokens at a time.

The gradient of the logits is computed together with the loss, in their place: neither the logits nor the probabilities (N, V) of
more than one chunk exist, and none is kept for the backward pass. The gradient of the weight (V, D) is summed over the chunks in
float32: in bfloat16, a sum of many chunks stops growing. That buffer is the gradient of a float32 weight; for a bfloat16 weight it
is cast, and both exist for a moment.

Shapes: B sequences, T tokens, N = B * T, D model dimension, V vocabulary, or this rank's shard of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titanlike.utils.compat import all_reduce
from titanlike.utils.weight_gradients import BLOCK_ROWS, accumulate_in_place, add_product, can_accumulate, take


@dataclass(frozen=True)
class Logits:
    """What logits are computed from: `x @ weight.T + bias`, bounded by `soft_cap * tanh(logits / soft_cap)`.

    Args:
        x: hidden states (B, T, D) or, without a weight, logits (B, T, V).
        weight: output projection (V, D). It is cast to the dtype of `x`; its gradient has its own dtype.
        bias: (V,), cast to the dtype of `x`.
        soft_cap: 0: no bound.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    soft_cap: float = 0.0

    def compute(self) -> Tensor:
        """Returns the logits (B, T, V), before their bound."""
        logits = self.x if self.weight is None else F.linear(self.x, self.weight.to(self.x.dtype))
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)

    def bounded(self) -> Tensor:
        """Returns the logits (B, T, V), bounded in float32 and then in their own dtype."""
        logits = self.compute()
        return soft_capped(logits, self.soft_cap).to(logits.dtype) if self.soft_cap else logits


Sums = Sequence[Tensor | None]
# (logits (n, V) of a chunk before their bound, which it may overwrite, rows of all N tokens) -> sums over the rows, of which the
# first is the loss, and the gradient of the loss.
Compute = Callable[[Tensor, slice], tuple[Sums, Tensor]]
# (logits, rows, factors of the losses (n,) or None) -> the loss of each row (n,), and the gradient of their sum.
ComputeTokens = Callable[[Tensor, slice, Tensor | None], tuple[Tensor, Tensor]]


def slices(first: int, last: int, size: int) -> list[slice]:
    """Returns the chunks of the rows from `first` to `last`; 0: one chunk."""
    size = size or max(last - first, 1)
    return [slice(start, min(start + size, last)) for start in range(first, last, size)]


@dataclass(eq=False)
class GradientFactor:
    """The number that backward passes of losses start from, if no objective scales its loss."""

    value: Tensor
    num_forward: int = 0  # losses computed
    num_backward: int = 0  # backward passes that have started from `value`, and made `weight.grad`
    in_weight: bool = False  # a loss has added to `weight.grad`, and its backward pass is to come


_factor: GradientFactor | None = None


@contextmanager
def gradient_factor(value: Tensor) -> Iterator[None]:
    """Lets losses in this context multiply their gradients by the number that the backward pass will start from, in a pass over
    the logits that they make anyway: then none over the gradients of the hidden states and of the weight is left. With backward
    passes in `accumulate_in_place`, losses after the first one add the gradient of the weight to `weight.grad` at once."""
    global _factor
    factor = _factor = GradientFactor(value)
    try:
        yield
        if factor.in_weight:
            raise RuntimeError("the objective does not return a loss that it computed; use torch.no_grad() for it")
    finally:
        _factor = None


def factor_of(logits: Logits) -> GradientFactor | None:
    """Returns the `gradient_factor` that a loss of these logits multiplies by. In float16 it would underflow; and a CPU computes
    more than it moves."""
    x = logits.x
    is_used = x.is_cuda and x.dtype != torch.float16 and logits.weight is not None and not torch.compiler.is_compiling()
    return _factor if is_used else None


def chunked_loss(
    logits: Logits,
    compute: Compute,
    chunks: Sequence[slice],
    *,
    finish: Callable[[Sums], Sums] = tuple,
    retain_graph: bool = False,
    factor: GradientFactor | None = None,
) -> Sums:
    """Returns the sums of what `compute` returns for each chunk. Only the first one, the loss, has a gradient.

    Args:
        finish: makes the loss and the others of the sums. Default: these are the sums.
        retain_graph: allows several backward passes, which take another buffer of the size of the weight. Otherwise the first one
            overwrites the gradients that the forward pass computed, and autograd raises an error in the second.
        factor: what `compute` has multiplied the gradient by.
    """
    needs_grad = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (logits.x, logits.weight)
    )
    # Compiled code does not allow the backward pass to overwrite saved tensors, nor need it.
    inplace = not (retain_graph or torch.compiler.is_compiling())
    return _ChunkedLoss.apply(*_rows(logits), chunks, compute, finish, needs_grad, inplace, factor)


def chunked_token_losses(logits: Logits, compute: ComputeTokens, chunk: int) -> Tensor:
    """Returns the loss of each token (B, T), for losses of whole sequences. The factor of a token in such a loss is known once the
    sequences have been summed: the backward pass computes the logits of each chunk again."""
    x, weight, bias = _rows(logits)
    assert bias is None
    losses: Tensor = _TokenLosses.apply(x, weight, slices(0, len(x), chunk), compute)
    return losses.view(logits.x.shape[:-1])


def _rows(logits: Logits) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if logits.weight is None:
        return logits.compute().flatten(0, -2), None, None
    return logits.x.flatten(0, -2), logits.weight, logits.bias


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        chunks: Sequence[slice],
        compute: Compute,
        finish: Callable[[Sums], Sums],
        needs_grad: bool,
        inplace: bool,
        factor: GradientFactor | None,
    ) -> tuple[Tensor | None, ...]:
        total = None
        if factor is not None and weight is not None and needs_grad:
            if inplace and 0 < factor.num_forward == factor.num_backward:
                with accumulate_in_place():
                    total = take(weight)
            factor.num_forward += 1
            factor.in_weight |= total is not None
        found, gradients = _run(x, weight, bias, chunks, compute, needs_grad, total)
        sums = tuple(finish([_sum(values) for values in zip(*found, strict=True)]))
        ctx.inplace, ctx.dtypes = inplace, [None if each is None else each.dtype for each in (x, weight, bias)]
        ctx.factor, ctx.weight, ctx.in_weight = factor, weight, total is not None
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*(each for each in sums[1:] if each is not None))
        return sums

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        found = list(zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        factor = None if ctx.factor is None else ctx.factor.value
        if scale is factor:
            gradients = [None if gradient is None else gradient.to(dtype) for gradient, dtype in found]
        else:
            if ctx.in_weight:
                raise RuntimeError("the objective scales this micro-batch's loss and not the last one's; scale both")
            rest = scale if factor is None else scale / factor
            gradients = [
                None if gradient is None else scaled(gradient, rest, dtype, inplace=ctx.inplace)
                for gradient, dtype in found
            ]
        if ctx.inplace and gradients[1] is not None:
            if can_accumulate(ctx.weight) and ctx.weight.grad is None:
                # What runs later in this pass, such as the embedding that shares the weight, can add to it.
                ctx.weight.grad, gradients[1] = gradients[1], None
            if scale is factor:
                ctx.factor.num_backward += gradients[1] is None
                ctx.factor.in_weight &= not ctx.in_weight
        return *gradients, *[None] * 6


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, chunks: Sequence[slice], compute: ComputeTokens) -> Tensor:
        ctx.chunks, ctx.compute = chunks, compute
        ctx.save_for_backward(x, weight)
        found, _ = _run(x, weight, None, chunks, lambda logits, rows: compute(logits, rows, None), False)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, (x_grad, weight_grad, _) = _run(
            x, weight, None, ctx.chunks, lambda logits, rows: ctx.compute(logits, rows, scale[rows]), True
        )
        return x_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None


def _run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    chunks: Sequence[slice],
    compute: Callable[[Tensor, slice], tuple[Any, Tensor]],
    needs_grad: bool,
    total: Tensor | None = None,
) -> tuple[list[Any], list[Tensor | None]]:
    """Returns what `compute` returns for each chunk, and the gradients of `x`, the weight (added to `total`) and the bias."""
    used = None if weight is None else weight.to(x.dtype)
    x_grad, weight_grad, bias_grad = None, total, None
    if needs_grad:
        # Allocate what is kept before the first logits, which come and go: this avoids fragmentation.
        x_grad = x.clone() if used is None else torch.empty_like(x)
        if weight_grad is None and weight is not None and weight.requires_grad:
            dtype = torch.float32 if len(chunks) > 1 else weight.dtype
            # On GPUs, the product of the first chunk replaces what is there.
            weight_grad = (torch.empty_like if weight.is_cuda else torch.zeros_like)(weight, dtype=dtype)
        if bias is not None and bias.requires_grad:
            bias_grad = torch.zeros_like(bias, dtype=torch.float32)
    found = []
    for rows in chunks:
        logits = x[rows] @ used.t() if used is not None else x[rows].clone() if x_grad is None else x_grad[rows]
        if bias is not None:
            logits += bias.to(x.dtype)
        values, gradient = compute(logits, rows)
        found.append(values)
        if x_grad is not None and used is not None:
            x_grad[rows] = gradient @ used
        elif x_grad is not None and gradient is not logits:
            x_grad[rows] = gradient
        if weight_grad is not None:
            is_first = total is None and rows is chunks[0]
            add_product(weight_grad, gradient.t(), x[rows], replace=is_first and weight_grad.is_cuda)
        if bias_grad is not None:
            bias_grad += gradient.sum(0, dtype=torch.float32)
        del logits, gradient  # before the next chunk's are allocated
    return found, [x_grad, weight_grad, bias_grad]


def _sum(values: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the sum of those that are not None."""
    total = None
    for each in values:
        # Not in place: torch 2.11's compiler, if it compiles the model, would lose the gradient of an output changed in place.
        total = total if each is None else each if total is None else total + each
    return total


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Returns logits in float32, bounded by `cap`; 0: no bound."""
    return (logits.float() / cap).tanh() * cap if cap else logits.float()


def reduced(values: Tensor, operation: str, vocab_group: dist.ProcessGroup | None) -> Tensor:
    """Reduces values over the ranks that share the vocabulary."""
    return values if vocab_group is None else all_reduce(values, operation, vocab_group)


def first_token(logits: Tensor, vocab_group: dist.ProcessGroup | None) -> int:
    """Returns the token of the first of this rank's logits."""
    return 0 if vocab_group is None else dist.get_rank(vocab_group) * logits.shape[-1]


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype, *, inplace: bool = False) -> Tensor:
    """Multiplies in float32 and rounds once: the scale must not be rounded to the gradient's dtype first."""
    out = gradient if inplace and gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    if gradient.dtype == torch.float32:
        return torch.mul(gradient, scale, out=out)
    if gradient.is_cuda:
        # One kernel, without copies: of a scalar that has a dimension, type promotion keeps float32.
        return torch.mul(gradient, scale[None], out=out)
    for first in range(0, gradient.shape[0], BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        torch.mul(gradient[rows].float(), scale, out=out[rows])
    return out


@cache
def compiled(function: Any, backend: str) -> Any:
    """Returns the compiled function, or the function itself if there is no backend."""
    return torch.compile(function, backend=backend, fullgraph=True) if backend else function
