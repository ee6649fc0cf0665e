"""Activation checkpointing: recompute activations in the backward pass instead of saving them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# The most expensive operators. Selective mode saves every attention output, and every second matmul.
ATTENTION = "aten._scaled_dot_product"  # the prefix of all its kernels
MATMULS = ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default")


def apply_activation_checkpoint(
    blocks: nn.ModuleDict,
    *,
    mode: Literal["none", "selective", "every_n", "full", "memory_budget"],
    every_n: int = 2,
    memory_budget: float = 0.5,
) -> None:
    """Checkpoints blocks by replacing their `forward`, so that parameter names do not change."""
    if mode == "memory_budget":
        # The partitioner reads this global setting at compile time; there is no setting per region.
        torch._functorch.config.activation_memory_budget = memory_budget
    for index, block in enumerate(blocks.values()):
        if mode == "selective":
            block.forward = _checkpoint(block.forward, context_fn=_selective_contexts)
        elif mode == "full" or (mode == "every_n" and index % every_n == 0):
            block.forward = _checkpoint(block.forward)


def _checkpoint(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Dropout is a function of its inputs, so there is no RNG state to restore. Saving one would synchronize with the GPU.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)


def _selective_contexts() -> Any:
    num_matmuls = {"forward": 0, "recompute": 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if str(operator).startswith(ATTENTION):
            return CheckpointPolicy.MUST_SAVE
        if str(operator) in MATMULS:
            phase = "recompute" if context.is_recompute else "forward"
            num_matmuls[phase] += 1
            if num_matmuls[phase] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
