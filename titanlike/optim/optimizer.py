"""From gradients to new weights: AdamW, the learning rate, clipping, and the stop before a bad step, or the way past it."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from titanlike.config.sections import Optimizer
from titanlike.optim.low_precision_adamw import LowPrecisionAdamW
from titanlike.utils.counter_rng import derive_seed
from titanlike.utils.dtensor import local_tensor


def build_optimizer(model: nn.Module, section: Optimizer, seed: int = 0) -> torch.optim.Optimizer:
    """AdamW over two groups: matrices and tables are decayed, norms and biases are not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    usual: dict[str, Any] = dict(lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)
    if section.state_dtype == "full" and not section.stochastic_rounding:
        return AdamW(groups, **usual, fused=section.fused)
    copies: dict[str, str] = getattr(model, "copies", {})  # rounded as their originals are, and so equal for ever
    seeds: dict[Tensor, int] = {}
    if section.stochastic_rounding:
        seeds = {p: derive_seed(seed, f"rounding of {copies.get(name, name)}") for name, p in model.named_parameters()}
    return LowPrecisionAdamW(groups, **usual, state=section.state_dtype, seeds=seeds)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, updating each rank's part of the parameters as plain tensors.

    The update is elementwise, so the numbers are the same. It leaves out DTensor's dispatch, which takes most of a second in the
    first step, and the import of `torch._dynamo`, which takes another and is of no use where nothing is compiled: torch imports
    it when an optimizer is made and when it takes a step, to keep both out of compiled code.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """The arguments of `torch.optim.AdamW`."""
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
            method: Any = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
            if method is not None and not hasattr(method, _EXCLUDED):
                setattr(method, _EXCLUDED, _excluded_once_imported(method))
        super().__init__(*arguments, **named)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        assert closure is None
        for group in self.param_groups:
            # Parameters, gradients, two moments, none of the maxima that only amsgrad has, step counts.
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            options: dict[str, Any] = {
                name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "fused")
            }
            beta1, beta2 = group["betas"]
            local: list[Any] = [[local_tensor(tensor) for tensor in tensors] for tensors in lists]
            adamw(*local, beta1=beta1, beta2=beta2, **options)


_EXCLUDED = "__dynamo_disable"  # where torch keeps the method as it is called outside of compiled code


def _excluded_once_imported(method: Any) -> Callable[..., Any]:
    """Calls a method of `Optimizer`, and excludes it from compiled code if something has imported `torch._dynamo`."""

    def call(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*arguments, **named)
        excluded = torch._dynamo.disable(method, wrapping=False)
        setattr(method, _EXCLUDED, excluded)
        return excluded(*arguments, **named)

    return call
