"""FlashAttention 3 and 4, which are packages of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from titanlike.config import UserError

# Versions of FlashAttention: the name that torch gives them, their package, and the GPUs by major compute capability.
FLASH_ATTENTION = {"flash3": ("FA3", "flash-attn-3", (9,)), "flash4": ("FA4", "flash-attn-4", (9, 10))}


@contextmanager
def flash_attention(name: str) -> Iterator[None]:
    """Replaces torch's FlashAttention by another version in this context. Raises `UserError` if it is not available."""
    problem = flash_attention_problem(name)
    if problem:
        raise UserError(f"training.attention = '{name}': {problem}; set training.attention = 'auto'")
    try:
        yield
    finally:
        restore_flash_attention()


def restore_flash_attention() -> None:
    """Activates torch's own FlashAttention, in versions of torch that can."""
    getattr(torch.nn.attention, "restore_flash_attention_impl", lambda: None)()


def flash_attention_problem(name: str) -> str:
    """Activates a version of FlashAttention for this process. Returns why that is not possible, or an empty string."""
    implementation, package, capabilities = FLASH_ATTENTION[name]
    if implementation not in getattr(torch.nn.attention, "list_flash_attention_impls", list)():
        return f"torch {torch.__version__} cannot select FlashAttention {name[-1]}"
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if found[0] not in capabilities:
        needed = " or ".join(f"{major}.x" for major in capabilities)
        return f"FlashAttention {name[-1]} requires a GPU of compute capability {needed}, not {found[0]}.{found[1]}"
    try:
        cast(Any, torch.nn.attention).activate_flash_attention_impl(implementation)
    except (ImportError, RuntimeError) as error:
        return (
            f"{package}, which FlashAttention {name[-1]} requires, cannot be used: {str(error).partition(chr(10))[0]}"
        )
    return ""
