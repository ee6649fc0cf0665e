"""The learning-rate schedule: linear warm-up, a stable phase, decay."""

import math

import torch

from titanlike.config.optimizer import Schedule


def learning_rate(step: int, num_steps: int, peak: float, section: Schedule) -> float:
    """Returns the learning rate of one step, counted from 1. A function of the step, so it has no state to checkpoint."""
    if step < section.warmup_steps:
        return peak * step / section.warmup_steps
    length = section.num_decay_steps(num_steps)
    progress = (step - (num_steps - length)) / max(length, 1)  # 0 at the start of the decay, 1 at the last step
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
    """Sets the learning rate of all parameter groups, times the factor of each."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_scale", 1.0)
