"""Activation checkpointing: recompute activations in the backward pass instead of saving them."""

from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlike.parallelisms.blocks import Blocks, check_choice, list_blocks
from titanlike.parallelisms.recomputation import KEEPS, keeping_contexts
from titanlike.utils import compat

# The most expensive operators, by prefixes of their names. Selective mode saves the output of every attention kernel, maximum
# and collective, and of every second matmul.
SAVED = (
    "aten.max.default",  # of float8: a number, for which the whole tensor is read
    "aten._scaled_dot_product",  # flash, efficient, cuDNN and the CPU's
    "flex_attention",
    "torch_attn._varlen_attn",
    "_c10d_functional.all_gather",
    "_c10d_functional.all_reduce",  # of float8 maxima
    "_c10d_functional.all_to_all",  # of expert parallelism
    "_c10d_functional.reduce_scatter",
)
MATMULS = ("aten.mm.", "aten.addmm.", "aten._scaled_mm.", "titanlike.grouped_matmul.")


def apply_activation_checkpoint(
    blocks: Blocks,
    *,
    mode: Literal["none", "selective", "full", "memory_budget"],
    memory_budget: float = 0.5,
    preserve_rng_state: bool = True,
) -> None:
    """Checkpoints blocks by replacing their `forward`, so that parameter names do not change.

    Args:
        mode: see `config.sections.ActivationCheckpoint`. `memory_budget` has an effect on compiled blocks only.
        preserve_rng_state: restores the state of the random generators for the recomputation. False is faster, and correct for
            blocks without random numbers, or whose only ones are `models.common.dropout.Dropout`'s, a function of its inputs.
    """
    check_choice("mode", mode, ("none", "selective", "full", "memory_budget"))
    if mode == "memory_budget":
        # The partitioner reads this global setting at compile time; there is no setting per region.
        compat.set_activation_memory_budget(memory_budget)
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    if mode not in ("selective", "full"):
        return
    for block in list_blocks(blocks):
        for module in _parts(block) if mode == "selective" else [block]:
            # The compiler supports the context_fn of selective checkpointing only. What keeps values is not compiled.
            options: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
            if _keeps_values(module):
                selective = partial(_selective_contexts, first=2) if options else None
                options = {"context_fn": partial(keeping_contexts, selective)}
            module.forward = partial(recompute, module.forward, **options)


def _keeps_values(module: nn.Module) -> bool:
    return any(hasattr(child, KEEPS) for child in module.modules())


def _parts(module: nn.Module) -> list[nn.Module]:
    """Returns what selective checkpointing recomputes together: the block or, if a part of it keeps values, which is not compiled,
    each part by itself. The compiler works around that part."""
    if hasattr(module, KEEPS) or not _keeps_values(module):
        return [module]
    return [part for child in module.children() for part in _parts(child)]


def _selective_contexts(first: int = 1) -> Any:
    """Returns the contexts of selective checkpointing.

    Args:
        first: the matmul from which every second one is saved. 2 for experts: the results of the third are larger.
    """
    num_matmuls = {"forward": 0, "recompute": 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if str(operator).startswith(SAVED):
            return CheckpointPolicy.MUST_SAVE
        if str(operator).startswith(MATMULS):
            phase = "recompute" if context.is_recompute else "forward"
            num_matmuls[phase] += 1
            if num_matmuls[phase] % 2 == first % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
