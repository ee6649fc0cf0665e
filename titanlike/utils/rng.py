"""Global random generators of Python, numpy and torch, for user code. The library itself draws from none of them."""

import random
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seeds all generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> dict[str, Any]:
    """Returns the states of all generators of this rank, as JSON values."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": _to_hex(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }
    states["numpy"]["state"]["key"] = states["numpy"]["state"]["key"].tolist()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Restores the states of all generators."""
    version, internal_state, gauss_next = states["python"]
    random.setstate((version, tuple(internal_state), gauss_next))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(_from_hex(states["torch"]))
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(states["cuda"]))


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
