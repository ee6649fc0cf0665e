"""Cross-entropy and z-loss, summed over valid tokens. The caller divides by the number of valid tokens in the global batch.

Shapes: B sequences, T tokens, N = B * T, V vocabulary, or this rank's shard of it.
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.config import UserError
from titanlike.losses import IGNORE
from titanlike.losses.chunked import (
    Logits,
    chunked_loss,
    chunked_token_losses,
    compiled,
    factor_of,
    first_token,
    reduced,
    slices,
    soft_capped,
)
from titanlike.losses.terms import MTP_LOSS, Z_LOSS, LossTerms

NO_LABEL = "no label: all its tokens are of prompts or padding, or not masked (data.prompt_field, mlm.mask_probability)"

Reduction = Literal["sum", "none"]


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """The cross-entropy that an LM head computes from its labels.

    Args:
        chunk: tokens whose logits exist at the same time; 0: all. Logits that are given (`Logits.weight` is None) are one chunk
            in eager mode, but for `reduction="none"`.
        vocab_group: ranks that share the vocabulary.
        backend: `torch.compile` backend for everything but the matmuls; empty: eager.
        retain_graph: see `chunked_loss`.
        z_loss: coefficient of the squared log-sum-exp of each token's logits, which is added where gradients are enabled: without
            them, as in validation, the result is the cross-entropy.
        reduction: `none` returns the cross-entropy of each token (B, T), 0 without a label. It allows neither a z-loss nor a bias.
        terms: receives the z-loss, which is part of the result, and the cross-entropy of auxiliary sequences.
    """

    chunk: int = 0
    vocab_group: dist.ProcessGroup | None = None
    backend: str = ""
    retain_graph: bool = False
    z_loss: float = 0.0
    reduction: Reduction = "sum"
    terms: LossTerms | None = None

    def __call__(self, logits: Logits, labels: Tensor, *, auxiliary: tuple[int, float] | None = None) -> Tensor:
        """Returns the loss for labels (B, T).

        Args:
            auxiliary: the number of sequences at the end of the batch whose loss has a gradient only, and its weight. The result
                is the loss of the others.
        """
        flat_labels = labels.flatten()

        def token_losses(values: Tensor, rows: slice, scale: Tensor | None) -> tuple[Tensor, Tensor]:
            function = compiled(cross_entropy_inplace, self.backend)
            losses, _ = function(values, flat_labels[rows], self.vocab_group, None, logits.soft_cap, scale, "none")
            return losses, values

        if self.reduction == "none":
            assert not self.z_loss and auxiliary is None
            return chunked_token_losses(logits, token_losses, self.chunk)
        # None disables it. Compiled code would treat a float that changes between calls as an input.
        z_loss = self.z_loss if self.z_loss and torch.is_grad_enabled() else None
        number, weight = auxiliary or (0, 1.0)
        num_main = len(flat_labels) - number * labels.shape[-1]  # tokens
        chunk, backend = (0, "") if logits.weight is None else (self.chunk, self.backend)
        function = compiled(cross_entropy_inplace, backend)
        if backend and logits.x.is_cuda and self.vocab_group is None and not logits.soft_cap and find_spec("triton"):
            from titanlike.losses import fused_cross_entropy

            function = fused_cross_entropy.cross_entropy_inplace
        factor = factor_of(logits)

        def compute(values: Tensor, rows: slice) -> tuple[tuple[Tensor | None, ...], Tensor]:
            is_main = rows.start < num_main
            scale = None if is_main else torch.full_like(flat_labels[rows], weight, dtype=torch.float32)
            if factor is not None:
                scale = factor.value.expand(len(values)) if scale is None else scale * factor.value
            loss, z_term = function(values, flat_labels[rows], self.vocab_group, z_loss, logits.soft_cap, scale)
            if is_main:
                return (loss, z_term, None), values
            return (None, None, loss if z_term is None else loss - z_term), values

        chunks = slices(0, num_main, chunk) + slices(num_main, len(flat_labels), chunk)
        loss, z_term, auxiliary_loss = chunked_loss(
            logits, compute, chunks, retain_graph=self.retain_graph, factor=factor
        )
        assert loss is not None
        if self.terms is not None:
            num_labels = num_valid(labels[: len(labels) - number])
            if z_term is not None:
                self.terms.add(Z_LOSS, z_term, num_labels)
            if auxiliary_loss is not None:  # its gradient is normalized by the labels of the others
                self.terms.add(MTP_LOSS, auxiliary_loss, num_labels * (number // (len(labels) - number)))
        return loss


def cross_entropy_inplace(
    logits: Tensor,
    labels: Tensor,
    vocab_group: dist.ProcessGroup | None = None,
    z_loss: float | None = None,
    soft_cap: float = 0.0,
    scale: Tensor | None = None,
    reduction: Reduction = "sum",
) -> tuple[Tensor, Tensor | None]:
    """Returns the loss of logits (N, V), summed or of each row, and the z-loss in it. Overwrites the logits with the gradient of
    the sum of the losses, each multiplied by its `scale` (N,)."""
    out = logits
    if soft_cap:
        logits = soft_capped(logits, soft_cap)
    valid = labels != IGNORE
    largest = logits.amax(-1, keepdim=True)  # for numerical stability; it cancels out
    label_ids = labels.where(valid, 0)[:, None]
    local = valid[:, None]
    if vocab_group is not None:
        largest = reduced(largest, "max", vocab_group)
        # A label lies in the vocabulary shard of one rank; the other ranks contribute zero.
        label_ids = label_ids - first_token(logits, vocab_group)
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
    total, label_logits = (reduced(term, "sum", vocab_group) for term in (total, label_logits))
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
    losses = losses.where(valid[:, None], 0.0)
    if reduction == "none":
        return losses[:, 0], None if z_losses is None else z_losses[:, 0]
    return losses.sum(), None if z_losses is None else z_losses.sum()


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
