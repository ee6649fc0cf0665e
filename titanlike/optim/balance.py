"""The update of the biases that balance the load of experts: a step by the sign of each expert's load above the average."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from titanlike.distributed.collectives import sum_over_mesh
from titanlike.models.common.experts import Router, load_of
from titanlike.utils.dtensor import local_tensor


class BalanceBias(torch.optim.Optimizer):
    """Decreases the bias of experts that had more tokens than the average, and increases the others'.

    The routers count the tokens since the last `zero_grad`, which the step sums over all ranks. It
    does not depend on the learning rate, and there is no state.

    Args:
        routers: Routers with a bias.
        rate: Size of the step.
    """

    def __init__(self, routers: Sequence[Router], *, rate: float) -> None:
        self.routers = routers
        super().__init__([cast(Tensor, router.expert_bias) for router in routers], dict(lr=rate))
        self.rate = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs a single optimization step. Returns the result of `closure`, which is called first."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        load = load_of(self.routers)  # (routers, E)
        if load is None:
            return loss
        total = sum_over_mesh(load, self.routers[0].weight)
        signs = (total * total.shape[1] - total.sum(1, keepdim=True)).sign()
        for parameter, sign in zip(self.param_groups[0]["params"], signs, strict=True):
            bias = local_tensor(parameter)  # the whole one, on every rank
            bias.sub_(sign.to(bias), alpha=self.rate)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the counts. The biases have no gradients."""
        for router in self.routers:
            router.reset_load()
