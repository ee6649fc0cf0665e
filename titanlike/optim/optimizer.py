"""AdamW, built from the recipe."""

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
    """Builds AdamW with two parameter groups: matrices and embeddings with weight decay, norms and biases without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = dict(lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)
    if section.state_dtype == "full" and not section.stochastic_rounding:
        return AdamW(groups, **options, fused=section.fused)
    copies: dict[str, str] = getattr(model, "copies", {})  # tied weights of a pipeline: equal seeds keep them equal
    seeds: dict[Tensor, int] = {}
    if section.stochastic_rounding:
        seeds = {p: derive_seed(seed, f"rounding of {copies.get(name, name)}") for name, p in model.named_parameters()}
    return LowPrecisionAdamW(groups, **options, state_dtype=section.state_dtype, seeds=seeds)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` on local shards, as plain tensors.

    The update is elementwise, so results are the same. It avoids DTensor dispatch, which takes most of a second in the first step,
    and the import of `torch._dynamo`, which takes another: torch imports it in the constructor and in `step`, to exclude both
    from compiled code.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `torch.optim.AdamW`."""
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
            method: Any = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
            if method is not None and not hasattr(method, _DISABLED):
                setattr(method, _DISABLED, _disable_lazily(method))
        super().__init__(*args, **kwargs)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Performs a single optimization step."""
        assert closure is None
        for group in self.param_groups:
            # Parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs (empty without amsgrad), step counts.
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            options: dict[str, Any] = {
                name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "fused")
            }
            beta1, beta2 = group["betas"]
            local: list[Any] = [[local_tensor(tensor) for tensor in tensors] for tensors in lists]
            adamw(*local, beta1=beta1, beta2=beta2, **options)


_DISABLED = "__dynamo_disable"  # where torch._disable_dynamo caches the disabled method


def _disable_lazily(method: Any) -> Callable[..., Any]:
    """Returns a method that disables dynamo only if something has imported `torch._dynamo`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        disabled = torch._dynamo.disable(method, wrapping=False)
        setattr(method, _DISABLED, disabled)
        return disabled(*args, **kwargs)

    return call
