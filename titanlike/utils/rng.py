"""The generators that a program of your own may draw from: Python's, numpy's and torch's. The library draws from none of them."""

import random
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Begin all of them anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> dict[str, Any]:
    """Where all of them stand on this rank, as JSON."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }
    states["numpy"]["state"]["key"] = states["numpy"]["state"]["key"].tolist()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Put all of them back to where they stood."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(_bytes(states["torch"]))
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))


def _text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
