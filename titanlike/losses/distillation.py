"""The loss of distillation: the KL divergence between the predictions of a teacher and of a student, beside the cross-entropy.

The logits of both models exist for one chunk of tokens at a time. The gradient is computed together with the loss, in place of
the student's logits, as in `losses/cross_entropy.py`.

Shapes: B sequences, T tokens, N tokens of a micro-batch or a chunk, V vocabulary, or this rank's shard of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.config.distill import Distillation
from titanlike.models.layers import set_loss
from titanlike.losses.cross_entropy import IGNORE, HeadLoss, add_product, compiled, scaled
from titanlike.utils.compat import all_reduce
from titanlike.utils.modules import without_owner

if TYPE_CHECKING:
    from titanlike.losses.top_k import TopK


@dataclass(frozen=True)
class TeacherLogits:
    """What the logits of a teacher are computed from."""

    x: Tensor  # hidden states (B, T, D) of its LM head or, without a weight, logits (B, T, V)
    weight: Tensor | None  # of its LM head (V, D)
    soft_cap: float


class HiddenStates:
    """In place of a loss, keeps what an LM head computes its logits from."""

    found: TeacherLogits | None = None

    def __call__(
        self, x: Tensor, weight: Tensor | None, labels: Tensor, soft_cap: float, bias: Tensor | None = None
    ) -> Tensor:
        assert bias is None  # only heads of encoders have one
        self.found = TeacherLogits(x, weight, soft_cap)
        return x.new_zeros(())


class DistillationLoss:
    """The loss that an LM head computes from its labels and from the logits of a teacher.

    `teacher` has to be set before each forward pass. Without one, the loss is the cross-entropy, as for an evaluation. After the
    forward pass, `sums` has the KL divergence and the cross-entropy, summed over the valid labels.
    """

    def __init__(self, head_loss: HeadLoss, section: Distillation) -> None:
        self.head_loss, self.section = head_loss, section
        self.teacher: TeacherLogits | TopK | None = None
        self.sums: Tensor | None = None

    def __call__(
        self, x: Tensor, weight: Tensor | None, labels: Tensor, soft_cap: float, bias: Tensor | None = None
    ) -> Tensor:
        assert bias is None  # only heads of encoders have one
        if self.teacher is None:
            return self.head_loss(x, weight, labels, soft_cap)
        loss, self.sums = distillation_loss(
            self.section, x, weight, labels, self.teacher, soft_cap=soft_cap, chunk=self.head_loss.chunk,
            vocab_group=self.head_loss.vocab_group, backend=self.head_loss.backend,
        )  # fmt: skip
        return loss


def set_distillation_loss(model: nn.Module, section: Distillation) -> DistillationLoss:
    """Replaces the loss of a model, which `parallelize` has set, and returns the new one."""
    head: Any = without_owner(model.get_submodule("output"))
    loss = DistillationLoss(head.loss, section)
    set_loss(model, loss)
    return loss


def distillation_loss(
    section: Distillation,
    x: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    teacher: "TeacherLogits | TopK",
    *,
    soft_cap: float = 0.0,
    chunk: int = 0,
    vocab_group: dist.ProcessGroup | None = None,
    backend: str = "",
) -> tuple[Tensor, Tensor]:
    """Returns the loss of the logits `x @ weight.T`, summed over the valid labels, and the sums (2,) of the KL divergence and of
    the cross-entropy, which have no gradient.

    The other arguments are those of `chunked_linear_cross_entropy`.
    """
    options: dict[str, Any] = dict(
        vocab_group=vocab_group,
        reverse=section.loss == "reverse_kl",
        temperature=section.temperature,
        label_weight=section.label_weight,
    )
    valid_labels = labels.flatten()
    if isinstance(teacher, TeacherLogits):
        inplace = compiled(distillation_loss_inplace, backend)
        targets, soft_caps = teacher.x.flatten(0, -2), (soft_cap, teacher.soft_cap)
        of_teacher = None if teacher.weight is None else teacher.weight.to(targets.dtype)

        def compute(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            teacher_logits = targets[rows] if of_teacher is None else targets[rows] @ of_teacher.t()
            return logits, inplace(logits, teacher_logits, valid_labels[rows], soft_caps=soft_caps, **options)
    else:
        from titanlike.losses.top_k import top_k_loss

        function = compiled(top_k_loss, backend)
        ids, log_probs = teacher.ids.flatten(0, -2).long(), teacher.log_probs.flatten(0, -2)

        def compute(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            of_rows = (ids[rows], log_probs[rows], valid_labels[rows])
            found: tuple[Tensor, Tensor] = function(logits, *of_rows, soft_cap=soft_cap, **options)
            return found

    x = x.flatten(0, -2)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    loss, sums = _ChunkedDistillation.apply(x, weight, chunk or x.shape[0], compute, section.weights, needs_grad)
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

    def capped(values: Tensor, cap: float) -> Tensor:
        return (values.float() / cap).tanh() * cap if cap else values.float()

    # Each pass computes again what it needs: compiled, no copy of the logits in float32 is written to memory.
    def student() -> Tensor:
        return capped(logits, soft_caps[0]) - largest[:, :1]

    def teacher() -> Tensor:
        return capped(teacher_logits, soft_caps[1]) - largest[:, 1:]

    def sums_of(*terms: Tensor) -> Tensor:
        return reduced("sum", *(term.sum(-1, keepdim=True) for term in terms))

    def reduced(operation: str, *columns: Tensor) -> Tensor:
        together = torch.cat(columns, -1)
        return together if vocab_group is None else all_reduce(together, operation, vocab_group)

    maxima = [
        capped(each, cap).amax(-1, keepdim=True) for each, cap in zip((logits, teacher_logits), soft_caps, strict=True)
    ]
    largest = reduced("max", *maxima)  # (N, 2), for numerical stability
    softened = temperature != 1.0
    terms = [(student() / temperature).exp(), (teacher() / temperature).exp()]
    totals = sums_of(*terms, *([student().exp()] if softened else [])).log()
    del terms
    of_student, of_teacher, of_labels = totals[:, :1], totals[:, 1:2], totals[:, -1:] if softened else totals[:, :1]

    def log_ratio() -> Tensor:
        return (student() - teacher()) / temperature - (of_student - of_teacher)

    def student_probs() -> Tensor:
        return (student() / temperature - of_student).exp()

    def teacher_probs() -> Tensor:
        return (teacher() / temperature - of_teacher).exp()

    first = dist.get_rank(vocab_group) * logits.shape[-1] if vocab_group is not None else 0
    # A mask, not a gather, which torch 2.11's inductor may run after the last pass.
    is_label = torch.arange(first, first + logits.shape[-1], device=logits.device) == labels[:, None]
    divergence = student_probs() * log_ratio() if reverse else teacher_probs() * -log_ratio()
    divergence, label_logits = sums_of(divergence, student().where(is_label, 0.0)).split(1, -1)
    # The gradient of temperature**2 x the divergence.
    gradient = student_probs() * (log_ratio() - divergence) if reverse else student_probs() - teacher_probs()
    gradient = gradient * (temperature * (1.0 - label_weight))
    if label_weight:
        gradient = gradient + label_weight * ((student() - of_labels).exp() - is_label.float())
    if soft_caps[0]:  # the derivative of the bound
        gradient = gradient * (1.0 - (logits.float() / soft_caps[0]).tanh().square())
    logits.copy_(gradient.where(valid, 0.0))
    return torch.cat((divergence, of_labels - label_logits), -1).where(valid, 0.0).sum(0)


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        chunk: int,
        compute: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
        weights: Sequence[float],
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        compute_weight = None if weight is None else weight.to(x.dtype)
        sums = torch.zeros(2, device=x.device)
        x_grad = weight_grad = None
        if needs_grad:
            # Allocate what is kept before the first logits, which come and go: this avoids fragmentation.
            x_grad = torch.zeros_like(x)
            if weight is not None and weight.requires_grad:
                # A sum of many chunks stops growing in bfloat16.
                dtype = torch.float32 if x.shape[0] > chunk else weight.dtype
                weight_grad = torch.zeros_like(weight, dtype=dtype)
        for first in range(0, x.shape[0], chunk):
            rows = slice(first, first + chunk)
            logits = x[rows].clone() if compute_weight is None else x[rows] @ compute_weight.t()
            gradient, of_chunk = compute(logits, rows)
            sums += of_chunk
            if x_grad is not None:
                x_grad[rows] = gradient if compute_weight is None else gradient @ compute_weight
            if weight_grad is not None:
                add_product(weight_grad, gradient.t(), x[rows])
            del logits, gradient  # before those of the next chunk are allocated
        ctx.dtype = None if weight is None else weight.dtype
        ctx.save_for_backward(x_grad, weight_grad)
        ctx.mark_non_differentiable(sums)
        return weights[0] * sums[0] + weights[1] * sums[1], sums

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        x_grad = scaled(x_grad, scale, x_grad.dtype, inplace=True)
        weight_grad = None if weight_grad is None else scaled(weight_grad, scale, ctx.dtype, inplace=True)
        return x_grad, weight_grad, *[None] * 4
