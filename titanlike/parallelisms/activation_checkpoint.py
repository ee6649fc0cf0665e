"""Activation checkpointing: recompute activations in the backward pass instead of saving them."""

from functools import partial
from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlike.parallelisms.blocks import Blocks, check_choice, list_blocks
from titanlike.parallelisms.recomputation import KEEPS, keeping_contexts
from titanlike.utils import compat

# The most expensive operators. Selective mode saves the output of every attention kernel and collective, by prefix of its name,
# and of every second matmul.
SAVED = (
    "aten._scaled_dot_product",  # flash, efficient, cuDNN and the CPU's
    "flex_attention",
    "torch_attn._varlen_attn",
    "_c10d_functional.all_gather",
    "_c10d_functional.all_reduce",  # of float8 maxima
    "_c10d_functional.all_to_all",  # of expert parallelism
    "_c10d_functional.reduce_scatter",
)
MATMULS = ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default", "titanlike.grouped_matmul.default")


def apply_activation_checkpoint(
    blocks: Blocks,
    *,
    mode: Literal["none", "selective", "every_n", "full", "memory_budget"],
    every_n: int = 2,
    memory_budget: float = 0.5,
    preserve_rng_state: bool = True,
) -> None:
    """Checkpoints blocks by replacing their `forward`, so that parameter names do not change.

    Args:
        mode: see `config.sections.ActivationCheckpoint`. `memory_budget` has an effect on compiled blocks only.
        preserve_rng_state: restores the state of the random generators for the recomputation. False is faster, and correct for
            blocks without random numbers, or with those of `models.layers.Dropout`, which is a function of its inputs.
    """
    check_choice("mode", mode, ("none", "selective", "every_n", "full", "memory_budget"))
    if mode == "memory_budget":
        # The partitioner reads this global setting at compile time; there is no setting per region.
        compat.set_activation_memory_budget(memory_budget)
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    for index, block in enumerate(list_blocks(blocks)):
        if mode in ("none", "memory_budget") or (mode == "every_n" and index % every_n):
            continue
        # The compiler supports the context_fn of selective checkpointing only. Blocks that keep values are compiled inside.
        options: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
        if any(hasattr(module, KEEPS) for module in block.modules()):
            options = {"context_fn": partial(keeping_contexts, options.get("context_fn"))}
        block.forward = partial(recompute, block.forward, **options)


def _selective_contexts() -> Any:
    num_matmuls = {"forward": 0, "recompute": 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if str(operator).startswith(SAVED):
            return CheckpointPolicy.MUST_SAVE
        if str(operator) in MATMULS:
            phase = "recompute" if context.is_recompute else "forward"
            num_matmuls[phase] += 1
            if num_matmuls[phase] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
