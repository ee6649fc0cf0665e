"""The optimizer of a recipe: AdamW, Muon for the matrices of blocks, and the rule of the biases that balance experts."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from titanlike.config.optimizer import Optimizer as OptimizerSection
from titanlike.config.optimizer import OptimizerGroup
from titanlike.models.common.experts import routers
from titanlike.optim.balance import BalanceBias
from titanlike.optim.combined import CombinedOptimizer
from titanlike.optim.low_precision_adamw import LowPrecisionAdamW
from titanlike.optim.muon import Muon, QKClip
from titanlike.optim.whole_matrices import group_of_shards
from titanlike.utils.counter_rng import derive_seed
from titanlike.utils.dtensor import local_tensor
from titanlike.utils.modules import copies_of


def build_optimizer(model: nn.Module, section: OptimizerSection, seed: int = 0) -> torch.optim.Optimizer:
    """Builds the optimizer of a recipe. All ranks call this together.

    The first two parameter groups are the matrices and embeddings that no group of the recipe matches, with weight decay, and such
    norms and biases, without.
    """
    default = OptimizerGroup()
    copies = copies_of(model)  # which the group of the original has to update
    members: dict[tuple[OptimizerGroup, bool], list[Tensor]] = {(default, True): [], (default, False): []}
    # Also those without a matrix on this pipeline stage: all ranks create Muon's process group, and clip their attention logits.
    members |= {(group, True): [] for group in section.groups if group.optimizer == "muon"}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.dim() >= 2 and not name.endswith("bias")  # experts have stacks of biases
            group = section.group_of(copies.get(name, name), is_matrix=decays) or default
            members.setdefault((group, decays), []).append(parameter)
    groups: dict[str, list[dict[str, Any]]] = {"adamw": [], "muon": []}
    for (group, decays), parameters in members.items():
        decay = group.weight_decay
        if decay is None:
            decay = section.weight_decay if decays else 0.0
        groups[group.optimizer].append({"params": parameters, "weight_decay": decay, "lr_scale": group.lr_scale})
    adamw = _build_adamw(model, section, groups["adamw"], seed)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if groups["muon"]:
        for parameter in model.parameters():
            group_of_shards(getattr(parameter, "device_mesh", None))
        muon = Muon(
            groups["muon"],
            lr=section.lr,
            momentum=section.muon_momentum,
            lr_scaling=section.muon_lr_scaling,
            qk_clip=QKClip(model, section.muon_qk_clip) if section.muon_qk_clip else None,
        )
        optimizers.append(muon)
    # With LoRA, the routers are frozen.
    balanced = [one for one in routers(model) if one.expert_bias is not None and one.weight.requires_grad]
    if balanced:
        optimizers.append(BalanceBias(balanced, rate=balanced[0].config.balance_bias_rate))
    if len(optimizers) == 1:
        return adamw
    return CombinedOptimizer(optimizers)


def _build_adamw(
    model: nn.Module, section: OptimizerSection, groups: list[dict[str, Any]], seed: int
) -> torch.optim.Optimizer:
    options: dict[str, Any] = dict(lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)
    if section.state_dtype == "full" and not section.stochastic_rounding:
        shards = [local_tensor(parameter) for parameter in model.parameters()]
        has_kernel = find_spec("triton") and all(shard.is_cuda and shard.is_contiguous() for shard in shards)
        return AdamW(groups, **options, fused=not has_kernel)
    seeds: dict[Tensor, int] = {}
    if section.stochastic_rounding:
        copies = copies_of(model)  # equal seeds keep them equal
        seeds = {p: derive_seed(seed, f"rounding of {copies.get(name, name)}") for name, p in model.named_parameters()}
    return LowPrecisionAdamW(groups, **options, state_dtype=section.state_dtype, seeds=seeds)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` on local shards, as plain tensors.

    The update is elementwise, so results are the same. DTensor dispatch would take up to half a second in the first step,
    and cannot update parameters on different meshes together, such as experts beside the rest of a block. Without `fused`, weights
    on GPUs are updated by a kernel that also clips their gradients.
    """

    _factor: Tensor | None = None

    def scale_in_step(self, factor: Tensor) -> set[Tensor]:
        """Multiplies gradients by `factor` in the next step, if that is free. Returns the parameters for which it is."""
        parameters = {parameter for group in self.param_groups for parameter in group["params"]}
        found = set(filter(self._has_kernel, parameters))
        self._factor = factor if found else None
        return found

    def _has_kernel(self, parameter: Tensor) -> bool:
        return parameter.is_cuda and not any(self.defaults[name] for name in ("fused", "amsgrad", "maximize"))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs a single optimization step. Returns the result of `closure`, which is called first."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            # Parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs (empty without amsgrad), step counts.
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            options: dict[str, Any] = {
                name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "fused")
            }
            beta1, beta2 = group["betas"]
            local: list[Any] = [[local_tensor(tensor) for tensor in tensors] for tensors in lists]
            if lists[0] and self._has_kernel(lists[0][0]):
                from titanlike.optim import fused_adamw

                weights, gradients, means, squares, _, steps = local
                used = {name: options[name] for name in ("lr", "weight_decay", "eps")}
                fused_adamw.update(
                    weights, gradients, means, squares, steps, self._factor, beta1=beta1, beta2=beta2, **used
                )
            else:
                adamw(*local, beta1=beta1, beta2=beta2, **options)
        self._factor = None
        return loss
