"""Several optimizers as one, such as Muon for the matrices of blocks and AdamW for the rest."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with the parameter groups and the state of all of them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The optimizers must have no state yet."""
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state, as `load_state_dict` does."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Gives each optimizer its groups of this one, and the state of all parameters."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What to record of each step, as far as an optimizer has `metrics`."""
        return {name: value for one in self.optimizers for name, value in getattr(one, "metrics", {}).items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs a single optimization step. Returns the result of `closure`, which is called first."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def scale_in_step(self, factor: Tensor) -> set[Tensor]:
        """Multiplies gradients by `factor` in the next step of the optimizers that can. Returns their parameters."""
        return {
            parameter
            for one in self.optimizers
            if hasattr(one, "scale_in_step")
            for parameter in one.scale_in_step(factor)
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters, and what an optimizer has besides them."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
