"""A user's loss in place of the cross-entropy.

Shapes: N tokens, V vocabulary, or this rank's shard of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.distributed.autograd_collectives import gather
from titanlike.losses import IGNORE
from titanlike.losses.chunked import Logits, chunked_loss, slices, soft_capped
from titanlike.losses.cross_entropy import CrossEntropy

# (logits (N, V) in float32, labels (N,)) -> the sum of the losses of the valid labels. See docs/extending.md.
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class OwnLoss(CrossEntropy):
    """A loss that replaces the cross-entropy where gradients are enabled. There are no chunks of logits that are given, or
    where `torch.compile` traces it.

    Args:
        function: takes the bounded logits of a chunk, with the full vocabulary.
    """

    function: LossFunction

    def __call__(self, logits: Logits, labels: Tensor, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().__call__(logits, labels, **options)
        assert not (self.z_loss or options) and self.reduction == "sum"
        flat_labels = labels.flatten()

        def loss_of(values: Tensor, rows: slice) -> Tensor:
            # The ranks that share the vocabulary all-gather it, and each computes the same.
            values = values if self.vocab_group is None else gather(values, 1, self.vocab_group)
            return self.function(soft_capped(values, logits.soft_cap), flat_labels[rows])

        if logits.weight is None or torch.compiler.is_compiling():
            return loss_of(logits.compute().flatten(0, -2), slice(None))

        @torch.enable_grad()
        def compute(values: Tensor, rows: slice) -> tuple[tuple[Tensor], Tensor]:
            values = values.detach().requires_grad_()
            loss = loss_of(values, rows)
            return (loss.detach(),), torch.autograd.grad(loss, values)[0]

        chunks = slices(0, len(flat_labels), self.chunk)
        (loss,) = chunked_loss(logits, compute, chunks, retain_graph=self.retain_graph)
        assert loss is not None
        return loss


def check_loss(model: nn.Module, loss: LossFunction, z_loss: float, device: torch.device) -> None:
    """Raises `UserError` if a loss cannot replace the cross-entropy of a model with an `LMHead`."""
    if z_loss:
        raise UserError(
            f"training.z_loss = {z_loss} is added to the cross-entropy, which the loss replaces; set it to 0, and "
            "add the term in the loss"
        )
    if getattr(getattr(model, "config", None), "num_mtp_layers", 0):
        raise UserError(
            "model.num_mtp_layers adds cross-entropies of further tokens, which the loss does not replace; set it to 0"
        )
    head: Any = model.get_submodule("output")
    check_function(loss, head.weight.shape[0], device)


def check_function(function: LossFunction, vocab_size: int, device: torch.device) -> None:
    """Raises `UserError` unless the loss is a sum over the valid labels, which chunks, micro-batches and ranks rely on."""
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    labels = torch.tensor([0, vocab_size - 1, IGNORE], device=device)
    loss = function(logits, labels)
    if loss.shape != () or not loss.requires_grad:
        raise UserError(
            f"the loss returns a tensor of shape {tuple(loss.shape)} {'with' if loss.requires_grad else 'without'} a gradient; "
            "return the sum of the losses of the tokens, a scalar that autograd can differentiate, for example with reduction='sum'"
        )
    each = [function(logits[row : row + 1], labels[row : row + 1]).item() for row in range(2)]
    if not abs(loss.item() - sum(each)) <= 1e-3 * sum(map(abs, each)):
        raise UserError(
            f"the loss of one token is {each[0]:.6g}, of another {each[1]:.6g} and of both, with a third whose label is {IGNORE}, "
            f"{loss.item():.6g}; return the sum over the labels that are not {IGNORE}, for example with reduction='sum', which the "
            "program divides by their number in the global batch"
        )
