"""Losses of preference pairs: DPO (Rafailov et al., 2023), IPO (Azar et al., 2023) and SimPO (Meng et al., 2024).

Shapes: B sequences, P pairs of a sequence at most. The last dimension is the chosen and the rejected answer.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from titanlike.config.dpo import Preference


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the answers of a batch."""

    log_probs: Tensor  # (B, P, 2): of all tokens of an answer; 0 where there is no pair
    num_tokens: Tensor  # (B, P, 2)

    @property
    def is_pair(self) -> Tensor:
        """Whether a place holds a pair (B, P)."""
        return (self.num_tokens > 0).all(-1)


def preference_loss(
    section: Preference, answers: Answers, reference: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the metrics of a batch, summed over its pairs. The caller divides by the pairs of the global batch.

    Args:
        reference: log-probabilities of the answers (B, P, 2) under the reference model; None for losses without one.
    """
    is_pair, beta = answers.is_pair, section.beta
    ratios = answers.log_probs if reference is None else answers.log_probs - reference
    # Of the whole answer, or averaged over its tokens.
    scores = ratios if section.loss == "dpo" else ratios / answers.num_tokens.clamp(min=1)
    margins = scores[..., 0] - scores[..., 1]
    if section.loss == "ipo":
        losses = (margins - 1.0 / (2.0 * beta)).square()
    else:
        logits = beta * margins - (section.simpo_gamma if section.loss == "simpo" else 0.0)
        smoothing = section.label_smoothing
        losses = -F.logsigmoid(logits) * (1.0 - smoothing) - F.logsigmoid(-logits) * smoothing
    # IPO's rewards are of whole answers, as in TRL.
    rewards = beta * (scores if section.loss == "simpo" else ratios).detach()
    metrics = {
        "rewards/chosen": rewards[..., 0],
        "rewards/rejected": rewards[..., 1],
        "rewards/margins": rewards[..., 0] - rewards[..., 1],
        "rewards/accuracies": (rewards[..., 0] - rewards[..., 1]).sign() / 2 + 0.5,  # equal rewards are half right
        "logps/chosen": answers.log_probs[..., 0].detach(),
        "logps/rejected": answers.log_probs[..., 1].detach(),
    }
    if reference is not None:
        metrics["kl"] = ratios.detach().mean(-1)
    return losses.where(is_pair, 0.0).sum(), {name: each.where(is_pair, 0.0).sum() for name, each in metrics.items()}
