"""Random numbers without a state: each is a function of what it is for, so no layout and no resumed run sees others."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the data's order is found without torch
    from torch import Tensor


def derive_seed(seed: int, name: str) -> int:
    """A generator seed for one name, far from those of other names and other seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def hash_u32(bits: Tensor) -> Tensor:
    """Spread 32 bits over 32 others (the finalizer of MurmurHash3), in integers of 64."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = bits & 0xFFFFFFFF
        bits = (bits ^ (bits >> shift)) * factor
    bits = bits & 0xFFFFFFFF
    return bits ^ (bits >> 16)
