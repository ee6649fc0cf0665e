"""A user's loss in place of the cross-entropy.

Shapes: N tokens, V vocabulary, or this rank's shard of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.models.layers import set_loss
from titanlike.losses.cross_entropy import IGNORE, HeadLoss, TokenLoss


def check_loss(model: nn.Module, loss: TokenLoss, z_loss: float, device: torch.device) -> None:
    """Raises `UserError` if a loss cannot replace the cross-entropy."""
    set_loss(model, HeadLoss(loss))  # refuses a head that is not of the library
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
    check_token_loss(loss, head.weight.shape[0], device)


def check_token_loss(token_loss: TokenLoss, vocab_size: int, device: torch.device) -> None:
    """Raises `UserError` unless the loss is a sum over the valid labels, which chunks, micro-batches and ranks rely on."""
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    labels = torch.tensor([0, vocab_size - 1, IGNORE], device=device)
    loss = token_loss(logits, labels)
    if loss.shape != () or not loss.requires_grad:
        raise UserError(
            f"the loss returns a tensor of shape {tuple(loss.shape)} {'with' if loss.requires_grad else 'without'} a gradient; "
            "return the sum of the losses of the tokens, a scalar that autograd can differentiate, for example with reduction='sum'"
        )
    each = [token_loss(logits[row : row + 1], labels[row : row + 1]).item() for row in range(2)]
    if not abs(loss.item() - sum(each)) <= 1e-3 * sum(map(abs, each)):
        raise UserError(
            f"the loss of one token is {each[0]:.6g}, of another {each[1]:.6g} and of both, with a third whose label is {IGNORE}, "
            f"{loss.item():.6g}; return the sum over the labels that are not {IGNORE}, for example with reduction='sum', which the "
            "program divides by their number in the global batch"
        )


def full_vocab_loss(
    token_loss: TokenLoss, logits: Tensor, labels: Tensor, vocab_group: dist.ProcessGroup | None, soft_cap: float
) -> Tensor:
    """Returns a user's loss of logits (N, V). The ranks of `vocab_group` all-gather the vocabulary, and each computes the same."""
    if vocab_group is not None:
        from titanlike.distributed.autograd_collectives import gather

        logits = gather(logits, 1, vocab_group)
    logits = logits.float()
    return token_loss((logits / soft_cap).tanh() * soft_cap if soft_cap else logits, labels)


@torch.enable_grad()
def loss_and_gradient(token_loss: TokenLoss, logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns `full_vocab_loss` and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    loss = full_vocab_loss(token_loss, logits, *others)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient
