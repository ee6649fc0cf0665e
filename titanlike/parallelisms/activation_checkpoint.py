"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# What costs most to compute again. Of the matrix products, every second one is kept.
MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default)
ATTENTION = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
    )
    if hasattr(torch.ops.aten, name)
)


def apply_activation_checkpoint(
    blocks: nn.ModuleDict,
    *,
    mode: Literal["none", "selective", "every_n", "full", "memory_budget"],
    every_n: int = 2,
    memory_budget: float = 0.5,
) -> None:
    """Make blocks recompute. Their `forward` is replaced and not the module, so that parameter names stay as they are."""
    if mode == "memory_budget":
        # The compiler's partitioner reads this when it compiles; there is no setting for a single region.
        torch._functorch.config.activation_memory_budget = memory_budget
    for index, block in enumerate(blocks.values()):
        if mode == "selective":
            block.forward = _recompute(block.forward, context_fn=_keep_the_costly)
        elif mode == "full" or (mode == "every_n" and index % every_n == 0):
            block.forward = _recompute(block.forward)


def _recompute(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Dropout here has no random state to put back, and saving one would cost a host synchronization on a GPU.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)


def _keep_the_costly() -> Any:
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator in MATRIX_PRODUCTS:
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            if seen[phase] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
