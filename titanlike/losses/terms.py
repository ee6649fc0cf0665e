"""Terms of the loss of a step, for the metrics: sums that the model adds up on the device, of which none is read until a record."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titanlike.distributed.collectives import sum_dtype

Z_LOSS, BALANCE_LOSS, MTP_LOSS = "z_loss", "balance_loss", "mtp_loss"


class LossTerms:
    """The sum of each term over the micro-batches of a step, and the number of labels that its mean is over.

    Args:
        names: of all terms of the model, also on other pipeline stages.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.sums: Tensor | None = None  # (terms, 2) since `reset`

    @torch.no_grad()
    def add(self, name: str, total: Tensor, num_labels: Tensor) -> None:
        """Adds a term of a micro-batch, summed over its labels."""
        if self.sums is None:
            self.sums = torch.zeros(len(self.names), 2, device=total.device, dtype=sum_dtype(total.device))
        self.sums[self.names.index(name)] += torch.stack((total.detach().float(), num_labels.float()))

    def reset(self) -> None:
        """Forgets the sums, after a step of the optimizer."""
        self.sums = None
