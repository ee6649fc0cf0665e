"""The loss of distillation: the KL divergence between the predictions of a teacher and of a student, beside the cross-entropy.

The logits of both models exist for one chunk of tokens at a time.

Shapes: B sequences, T tokens, N tokens of a micro-batch or a chunk, V vocabulary, or this rank's shard of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.config.distill import Distillation
from titanlike.losses import IGNORE
from titanlike.losses.chunked import Logits, Sums, chunked_loss, compiled, first_token, reduced, slices, soft_capped
from titanlike.losses.cross_entropy import CrossEntropy
from titanlike.losses.top_k import TopK, top_k_loss


class KeptLogits:
    """In place of a loss, keeps what an LM head computes its logits from."""

    found: Logits | None = None

    def __call__(self, logits: Logits, labels: Tensor) -> Tensor:
        self.found = logits
        return logits.x.new_zeros(())


class DistillationLoss:
    """The loss that an LM head computes from its labels and from the logits of a teacher.

    `teacher` has to be set before each forward pass. Without one, the loss is the cross-entropy, as for an evaluation. After the
    forward pass, `sums` has the KL divergence and the cross-entropy, summed over the valid labels.
    """

    def __init__(self, section: Distillation, cross_entropy: CrossEntropy) -> None:
        self.section, self.cross_entropy = section, cross_entropy
        self.teacher: Logits | TopK | None = None
        self.sums: Tensor | None = None

    def __call__(self, logits: Logits, labels: Tensor) -> Tensor:
        if self.teacher is None:
            return self.cross_entropy(logits, labels)
        loss, self.sums = distillation_loss(self.section, logits, labels, self.teacher, self.cross_entropy)
        return loss


def distillation_loss(
    section: Distillation,
    logits: Logits,
    labels: Tensor,
    teacher: Logits | TopK,
    options: CrossEntropy,
) -> tuple[Tensor, Tensor]:
    """Returns the loss, summed over the valid labels, and the sums (2,) of the KL divergence and of the cross-entropy, which have
    no gradient.

    Args:
        options: only its `chunk`, `vocab_group` and `backend` are used.
    """
    flat_labels = labels.flatten()
    settings: dict[str, Any] = dict(
        vocab_group=options.vocab_group,
        reverse=section.loss == "reverse_kl",
        temperature=section.temperature,
        label_weight=section.label_weight,
    )
    if isinstance(teacher, Logits):
        inplace = compiled(distillation_loss_inplace, options.backend)
        soft_caps = logits.soft_cap, teacher.soft_cap
        hidden = teacher.x.flatten(0, -2)
        weight = None if teacher.weight is None else teacher.weight.to(hidden.dtype)

        def compute(values: Tensor, rows: slice) -> tuple[tuple[Tensor], Tensor]:
            teacher_logits = hidden[rows] if weight is None else hidden[rows] @ weight.t()
            sums = inplace(values, teacher_logits, flat_labels[rows], soft_caps=soft_caps, **settings)
            return (sums,), values
    else:
        function = compiled(top_k_loss, options.backend)
        ids, log_probs = teacher.ids.flatten(0, -2).long(), teacher.log_probs.flatten(0, -2)

        def compute(values: Tensor, rows: slice) -> tuple[tuple[Tensor], Tensor]:
            targets = ids[rows], log_probs[rows], flat_labels[rows]
            gradient, sums = function(values, *targets, soft_cap=logits.soft_cap, **settings)
            return (sums,), gradient

    def finish(found: Sums) -> Sums:
        [sums] = found
        assert sums is not None
        return section.weights[0] * sums[0] + section.weights[1] * sums[1], sums

    loss, sums = chunked_loss(logits, compute, slices(0, len(flat_labels), options.chunk), finish=finish)
    assert loss is not None and sums is not None
    return loss, sums


def distillation_loss_inplace(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    vocab_group: dist.ProcessGroup | None,
    reverse: bool,
    temperature: float,
    label_weight: float,
    soft_caps: tuple[float, float],
) -> Tensor:
    """Returns the KL divergence and the cross-entropy of logits (N, V), each summed over the valid labels (N,), and overwrites the
    logits with the gradient of the loss."""
    valid = (labels != IGNORE)[:, None]

    # Each pass computes again what it needs: compiled, no copy of the logits in float32 is written to memory.
    def student() -> Tensor:
        return soft_capped(logits, soft_caps[0]) - largest[:, :1]

    def teacher() -> Tensor:
        return soft_capped(teacher_logits, soft_caps[1]) - largest[:, 1:]

    def sums_of(*terms: Tensor) -> Tensor:
        return reduced(torch.cat([term.sum(-1, keepdim=True) for term in terms], -1), "sum", vocab_group)

    maxima = [
        soft_capped(each, cap).amax(-1, keepdim=True)
        for each, cap in zip((logits, teacher_logits), soft_caps, strict=True)
    ]
    largest = reduced(torch.cat(maxima, -1), "max", vocab_group)  # (N, 2), for numerical stability
    softened = temperature != 1.0
    terms = [(student() / temperature).exp(), (teacher() / temperature).exp()]
    totals = sums_of(*terms, *([student().exp()] if softened else [])).log()
    del terms
    student_lse, teacher_lse, label_lse = totals[:, :1], totals[:, 1:2], totals[:, -1:] if softened else totals[:, :1]

    def log_ratio() -> Tensor:
        return (student() - teacher()) / temperature - (student_lse - teacher_lse)

    def student_probs() -> Tensor:
        return (student() / temperature - student_lse).exp()

    def teacher_probs() -> Tensor:
        return (teacher() / temperature - teacher_lse).exp()

    first = first_token(logits, vocab_group)
    # A mask, not a gather, which torch 2.11's inductor may run after the last pass.
    is_label = torch.arange(first, first + logits.shape[-1], device=logits.device) == labels[:, None]
    divergence = student_probs() * log_ratio() if reverse else teacher_probs() * -log_ratio()
    divergence, label_logits = sums_of(divergence, student().where(is_label, 0.0)).split(1, -1)
    # The gradient of temperature**2 x the divergence.
    gradient = student_probs() * (log_ratio() - divergence) if reverse else student_probs() - teacher_probs()
    gradient = gradient * (temperature * (1.0 - label_weight))
    if label_weight:
        gradient = gradient + label_weight * ((student() - label_lse).exp() - is_label.float())
    if soft_caps[0]:  # the derivative of the bound
        gradient = gradient * (1.0 - (logits.float() / soft_caps[0]).tanh().square())
    logits.copy_(gradient.where(valid, 0.0))
    return torch.cat((divergence, label_lse - label_logits), -1).where(valid, 0.0).sum(0)
