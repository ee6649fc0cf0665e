"""The update of the biases that balance the load of experts: a step by the sign of each expert's load above the average."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from titanlike.utils.dtensor import local_tensor


class BalanceBias(torch.optim.Optimizer):
    """Decreases the bias of experts that had more tokens than the average, and increases that of the others.

    The gradient of a bias is that number of tokens (`models/experts.py`), summed over the global batch. The step does not depend on
    the learning rate, and there is no state.

    Args:
        parameters: Biases of routers.
        rate: Size of the step.
    """

    def __init__(self, parameters: Iterable[Tensor], *, rate: float) -> None:
        super().__init__(parameters, dict(lr=rate))
        self.rate = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs a single optimization step. Returns the result of `closure`, which is called first."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local_tensor(parameter).sub_(local_tensor(parameter.grad).sign(), alpha=self.rate)
        return loss
