"""From gradients to new weights: AdamW, the learning rate, clipping, and the stop before a bad step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike import distributed
from titanlike.adamw import LowMemoryAdamW
from titanlike.config import UserError
from titanlike.config.sections import Optimizer, Schedule
from titanlike.noise import seed_of


def build_optimizer(model: nn.Module, section: Optimizer, seed: int = 0) -> torch.optim.Optimizer:
    """AdamW over two groups: matrices and tables are decayed, norms and biases are not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    usual: dict[str, Any] = dict(lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)
    if section.state == "full" and not section.stochastic_rounding:
        return torch.optim.AdamW(groups, **usual, fused=section.fused)
    copies: dict[str, str] = getattr(model, "copies", {})  # rounded as their originals are, and so equal for ever
    seeds: dict[Tensor, int] = {}
    if section.stochastic_rounding:
        seeds = {p: seed_of(seed, f"rounding of {copies.get(name, name)}") for name, p in model.named_parameters()}
    return LowMemoryAdamW(groups, **usual, state=section.state, seeds=seeds)


def learning_rate(step: int, num_steps: int, peak: float, section: Schedule) -> float:
    """The rate of one step, counted from 1. A function of the step alone, so there is no state to save."""
    if step < section.warmup_steps:
        return peak * step / section.warmup_steps
    length = section.decay_steps or num_steps - section.warmup_steps
    progress = (step - (num_steps - length)) / max(length, 1)  # 0 where the decay begins, 1 at the last step
    if progress <= 0 or section.decay == "none":
        return peak
    progress = min(progress, 1.0)
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "sqrt": 1.0 - math.sqrt(progress),
    }[section.decay]
    return peak * (section.min_ratio + (1.0 - section.min_ratio) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use this rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def gradient_norm(model: nn.Module, pipeline: DeviceMesh | None = None) -> Tensor:
    """The norm of all gradients together, over all shards, and over the ranks of a pipeline that hold other blocks."""
    copies = getattr(model, "copies", {})  # counted where their original is
    shards: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}  # by the groups of ranks that have the other shards
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name not in copies:
            groups = distributed.sharers(parameter.grad)
            shards.setdefault(groups, []).append(distributed.local_part(parameter.grad))
    squares = [
        distributed.sum_over(torch.nn.utils.get_total_norm(gradients).square(), groups)
        for groups, gradients in shards.items()
    ]
    across = [] if pipeline is None else [pipeline.get_group()]
    return distributed.sum_over(torch.stack(squares).sum(), across).sqrt()


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale the gradients down so that their norm, which is `norm` now, is `max_norm` at most."""
    torch.nn.utils.clip_grads_with_norm_([p for p in model.parameters() if p.grad is not None], max_norm, norm)


def stop_if_not_finite(step: int, loss: Tensor, local_loss: Tensor, grad_norm: Tensor, model: nn.Module) -> None:
    """Raise before the gradients are used, if they would ruin the weights, naming the step and where it came from.

    `loss` and `grad_norm` are the same on all ranks, so all of them stop here together; `local_loss` is each rank's own.
    """
    if bool(torch.isfinite(loss + grad_norm)):
        return
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _all_finite(p.grad)]
    reports = distributed.gather((local_loss.item(), bad))
    guilty = [rank for rank, (value, _) in enumerate(reports) if not math.isfinite(value)]
    holders = [rank for rank, (_, names) in enumerate(reports) if names]
    if guilty:
        cause = f"the loss is {reports[guilty[0]][0]} on rank {_list(guilty)}"
    elif holders:
        names = reports[holders[0]][1]
        cause = (
            f"the loss is finite, but not the gradient of {_list(names[:3])}, in the part held by rank {_list(holders)}"
        )
    else:
        cause = (
            f"loss and gradients are finite, but the gradient norm is {grad_norm.item()}: they are too large to add up"
        )
    raise UserError(
        f"step {step}: {cause}. The step was not taken and nothing was saved; earlier checkpoints are sound. "
        "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of that step"
    )


def _list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def _all_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(distributed.local_part(gradient)).all())
