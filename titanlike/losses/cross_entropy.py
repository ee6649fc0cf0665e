"""Cross-entropy and z-loss, summed over valid tokens. The caller divides by the number of valid tokens in the global batch.

The gradient of the logits is computed together with the loss, in place: neither the logits nor the probabilities (N, V) are kept
for the backward pass, and `chunked_linear_cross_entropy` holds them for one chunk of tokens at a time. It accumulates the gradient
of the weight (V, D) over the chunks in float32: in bfloat16, a sum of many chunks stops growing. That buffer is the gradient of a
float32 weight; for a bfloat16 weight it is cast, and both exist for a moment.

Shapes: N tokens, D model dimension, V vocabulary, or this rank's shard of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titanlike.config import UserError
from titanlike.models.base_config import IGNORE as IGNORE
from titanlike.utils.compat import all_reduce

if TYPE_CHECKING:
    from titanlike.losses.terms import LossTerms

NO_LABEL = "no label: all its tokens are of prompts or padding, or not masked (data.prompt_field, mlm.mask_probability)"
BLOCK_ROWS = 4096  # of the weight's gradient, cast at once

# (logits (N, V) in float32, labels (N,)) -> the sum of the losses of the valid labels. See docs/copy.md.
TokenLoss = Callable[[Tensor, Tensor], Tensor]


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Returns logits bounded by `cap`, in float32 and then in their own dtype."""
    return ((logits.float() / cap).tanh() * cap).to(logits.dtype)


def chunked_linear_cross_entropy(
    x: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    *,
    chunk: int = 0,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str = "",
    retain_graph: bool = False,
    z_loss: float = 0.0,
    soft_cap: float = 0.0,
    token_loss: TokenLoss | None = None,
    reduction: Literal["sum", "none"] = "sum",
    bias: Tensor | None = None,
    auxiliary: tuple[int, float] | None = None,
    terms: "LossTerms | None" = None,
) -> Tensor:
    """Returns the summed cross-entropy of the logits `x @ weight.T + bias`, computed for `chunk` tokens at a time.

    Args:
        x: hidden states (B, T, D), or the logits (B, T, V) if `weight` is None.
        weight: output projection (V, D). It is cast to the dtype of `x`; its gradient has its own dtype.
        chunk: tokens whose logits exist at the same time; 0: all.
        vocab_group: ranks that share the vocabulary.
        backend: `torch.compile` backend for everything but the matmuls; empty: eager.
        retain_graph: allows several backward passes, which take another buffer of the size of the weight. Otherwise the first one
            overwrites the gradients that the forward pass computed, and autograd raises an error in the second.
        z_loss: coefficient of the squared log-sum-exp of each token's logits, which is added where gradients are enabled: without
            them, as in validation, the result is the cross-entropy.
        soft_cap: bounds the logits `x` by `soft_cap * tanh(x / soft_cap)`; 0: no bound.
        token_loss: replaces the cross-entropy where gradients are enabled. It takes the bounded logits of a chunk, with the full
            vocabulary. Where `torch.compile` traces this function, there are no chunks.
        reduction: `none` returns the cross-entropy of each token (B, T), 0 without a label. Its backward pass computes the logits
            again, because only then is the weight of each token known; it allows neither a z-loss nor a `token_loss` nor a `bias`.
        bias: added to the logits (V,), in their dtype. Default: none.
        auxiliary: the number of sequences at the end of the batch whose loss has a gradient only, and the weight of it. The result
            is the loss of the others. It does not allow a `token_loss`.
        terms: receives the z-loss, which is part of the result, and the cross-entropy of the auxiliary sequences.
    """
    assert not (token_loss and (z_loss or auxiliary))
    if reduction == "none":
        from titanlike.losses.chunked import token_cross_entropies

        assert token_loss is None and not z_loss and bias is None and auxiliary is None
        return token_cross_entropies(x, weight, labels, chunk, vocab_group, backend, soft_cap)
    # None disables it. Compiled code would treat a float that changes between calls as an input.
    coefficient = z_loss if z_loss and torch.is_grad_enabled() else None
    token_loss = token_loss if torch.is_grad_enabled() else None
    if token_loss is not None and (weight is None or torch.compiler.is_compiling()):
        from titanlike.losses.own import full_vocab_loss

        logits = x if weight is None else F.linear(x, weight.to(x.dtype))
        logits = logits if bias is None else logits + bias.to(x.dtype)
        return full_vocab_loss(token_loss, logits.flatten(0, -2), labels.flatten(), vocab_group, soft_cap)
    if weight is None:
        from titanlike.losses.logits_loss import cross_entropy_of_logits

        x = x if bias is None else x + bias.to(x.dtype)
        loss, *others = cross_entropy_of_logits(x, labels, vocab_group, coefficient, soft_cap, auxiliary)
    else:
        num_auxiliary = auxiliary[0] * labels.shape[1] if auxiliary else 0  # tokens
        needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        rows = x.flatten(0, -2)
        loss, *others = _ChunkedLinearCrossEntropy.apply(
            rows, weight, labels.flatten(), chunk or rows.shape[0], vocab_group, backend, needs_grad, retain_graph, coefficient,
            soft_cap, token_loss, bias, num_auxiliary, auxiliary[1] if auxiliary else 1.0,
        )  # fmt: skip
    if terms is not None:
        terms.add_of_head(labels, auxiliary[0] if auxiliary else 0, *others)
    return loss


@dataclass(frozen=True)
class HeadLoss:
    """The loss that an LM head computes from its labels. The fields are arguments of `chunked_linear_cross_entropy`."""

    token_loss: TokenLoss | None = None
    chunk: int = 0
    vocab_group: dist.ProcessGroup | None = None
    backend: str = ""
    retain_graph: bool = False
    z_loss: float = 0.0
    reduction: Literal["sum", "none"] = "sum"
    terms: "LossTerms | None" = None

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        soft_cap: float,
        bias: Tensor | None = None,
        auxiliary: tuple[int, float] | None = None,
    ) -> Tensor:
        return chunked_linear_cross_entropy(
            x, weight, labels, chunk=self.chunk, vocab_group=self.vocab_group, backend=self.backend, z_loss=self.z_loss,
            retain_graph=self.retain_graph, soft_cap=soft_cap, token_loss=self.token_loss, reduction=self.reduction, bias=bias,
            auxiliary=auxiliary, terms=self.terms,
        )  # fmt: skip


def cross_entropy_inplace(
    logits: Tensor,
    labels: Tensor,
    vocab_group: dist.ProcessGroup | None = None,
    z_loss: float | None = None,
    soft_cap: float = 0.0,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the summed loss of logits (N, V) and the z-loss in it, and overwrites them with their gradient, multiplied by `scale`
    (N,)."""
    losses, z_losses = token_losses_inplace(logits, labels, vocab_group, z_loss, soft_cap, scale)
    return losses.sum(), None if z_losses is None else z_losses.sum()


def token_losses_inplace(
    logits: Tensor,
    labels: Tensor,
    vocab_group: dist.ProcessGroup | None = None,
    z_loss: float | None = None,
    soft_cap: float = 0.0,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the loss of each row of logits (N, V) as (N, 1), and the z-loss in it. Overwrites the logits with the gradient of the
    sum of the losses, each multiplied by its `scale` (N,)."""
    out = logits
    if soft_cap:
        logits = (logits.float() / soft_cap).tanh() * soft_cap
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
    # Compiled, each of three passes recomputes what it needs and the last one writes in place; in eager mode every
    # operation works in place.
    compiling = torch.compiler.is_compiling()
    if compiling:
        # A sum, not a gather, which torch 2.11's inductor may run after the last pass.
        is_label = (torch.arange(logits.shape[-1], device=logits.device) == label_ids) & local
        label_logits = (logits.float() - largest).where(is_label, 0.0).sum(-1, keepdim=True)
    else:
        label_logits = (logits.gather(-1, label_ids).float() - largest).where(local, 0.0)
    probs = (logits.float() - largest).exp() if compiling else logits.float().sub_(largest).exp_()
    total = probs.sum(-1, keepdim=True)
    if vocab_group is not None:
        total, label_logits = (all_reduce(term, "sum", vocab_group) for term in (total, label_logits))
    losses, z_losses = total.log() - label_logits, None
    factor: Tensor | float = 1.0  # of the probabilities, the gradient of the log-sum-exp
    if z_loss is not None:
        log_sum_exp = largest + total.log()
        z_losses = (z_loss * log_sum_exp.square()).where(valid[:, None], 0.0)
        losses = losses + z_losses
        factor = 1.0 + 2.0 * z_loss * log_sum_exp
    if compiling:
        probs = ((logits.float() - (largest + total.log())).exp() * factor).where(valid[:, None], 0.0)
        gradient = probs - is_label.float()
    else:
        gradient = probs.mul_(valid[:, None] * factor / total).scatter_add_(-1, label_ids, -local.float())
    if soft_cap and compiling:
        gradient = gradient * (1.0 - (out.float() / soft_cap).tanh().square())
    elif soft_cap:  # the derivative of the bound
        gradient.mul_((out.float() / soft_cap).tanh_().square_().neg_().add_(1.0))
    if scale is not None:
        gradient = gradient * scale[:, None] if compiling else gradient.mul_(scale[:, None])
    out.copy_(gradient)
    return losses.where(valid[:, None], 0.0), z_losses


def num_valid(labels: Tensor) -> Tensor:
    """Returns the number of labels that contribute to the loss."""
    return (labels != IGNORE).sum()


def means_of(
    totals: Tensor, count: Tensor, data: str = "the validation data", key: str = "validation.batches"
) -> list[float]:
    """Returns sums over the labels of some data (N,), divided by the number of labels. Raises `UserError` if there is none.

    Args:
        key: sets how much of the data is read.
    """
    count = count[None].to(totals)
    *means, number = torch.cat((totals / count, count)).tolist()
    if not number and not math.isfinite(sum(means)):  # on a null GPU, both are 0
        raise UserError(f"{data} has {NO_LABEL}; increase {key}, or give other data")
    return means


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


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to `total`, which may be in float32 while the factors are not."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.compiler.is_compiling():  # inductor of torch 2.14 does not have the next one
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # only CUDA has this matmul; some rows at a time, because a product takes memory
        for first in range(0, total.shape[0], BLOCK_ROWS):
            rows = slice(first, first + BLOCK_ROWS)
            total[rows].add_(left[rows] @ right)


@cache
def compiled(function: Any, backend: str) -> Any:
    """Returns the compiled function, or the function itself if there is no backend."""
    return torch.compile(function, backend=backend, fullgraph=True) if backend else function


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
        retain_graph: bool,
        z_loss: float | None,
        soft_cap: float,
        token_loss: TokenLoss | None,
        bias: Tensor | None,
        num_auxiliary: int,
        auxiliary_weight: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.dtype = weight.dtype
        # Compiled code does not allow the backward pass to overwrite saved tensors, nor need it.
        ctx.inplace = not (retain_graph or torch.compiler.is_compiling())
        compute_weight = weight.to(x.dtype)
        total = torch.zeros((), device=x.device)
        z_total: Tensor | None = None  # part of it
        auxiliary_total: Tensor | None = None
        if needs_grad:
            # Allocate what is kept before the first logits, which come and go: this avoids fragmentation.
            x_grad = torch.zeros_like(x)
            several = x.shape[0] > chunk or num_auxiliary > 0
            # None of a frozen head, as that of a model with LoRA.
            dtype = torch.float32 if several else weight.dtype
            weight_grad = torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None
            bias_grad = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias.requires_grad else None
        num_main = x.shape[0] - num_auxiliary
        for first in (*range(0, num_main, chunk), *range(num_main, x.shape[0], chunk)):
            is_main = first < num_main
            rows = slice(first, min(first + chunk, num_main if is_main else x.shape[0]))
            scale = None if is_main else torch.full_like(labels[rows], auxiliary_weight, dtype=torch.float32)
            logits = x[rows] @ compute_weight.t()
            if bias is not None:
                logits += bias.to(x.dtype)
            if token_loss is not None:
                from titanlike.losses.own import loss_and_gradient

                loss, logits = loss_and_gradient(token_loss, logits, labels[rows], vocab_group, soft_cap)
                z_term = None
            else:
                inplace = compiled(cross_entropy_inplace, backend)
                loss, z_term = inplace(logits, labels[rows], vocab_group, z_loss, soft_cap, scale)
            # Not in place: torch 2.11's compiler, if it compiles the model, would lose the gradient of an output changed in place.
            if is_main:
                total = total + loss
                z_total = z_term if z_total is None or z_term is None else z_total + z_term
            else:
                loss = loss if z_term is None else loss - z_term
                auxiliary_total = loss if auxiliary_total is None else auxiliary_total + loss
            if needs_grad:
                x_grad[rows] = logits @ compute_weight  # `logits` holds its gradient now
                if weight_grad is not None:
                    add_product(weight_grad, logits.t(), x[rows])
                if bias_grad is not None:
                    bias_grad += logits.sum(0, dtype=torch.float32)
            del logits  # before those of the next chunk are allocated
        if needs_grad:
            ctx.bias_dtype = None if bias is None else bias.dtype
            ctx.save_for_backward(x_grad, weight_grad, bias_grad)
        ctx.mark_non_differentiable(*(each for each in (z_total, auxiliary_total) if each is not None))
        return total, z_total, auxiliary_total

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad, bias_grad = ctx.saved_tensors
        x_grad = scaled(x_grad, scale, x_grad.dtype, inplace=ctx.inplace)
        weight_grad = None if weight_grad is None else scaled(weight_grad, scale, ctx.dtype, inplace=ctx.inplace)
        bias_grad = None if bias_grad is None else scaled(bias_grad, scale, ctx.bias_dtype)
        return x_grad, weight_grad, *[None] * 9, bias_grad, None, None
