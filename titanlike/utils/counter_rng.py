"""Counter-based random numbers: each is a function of its seed and purpose, independent of the layout and of interruptions."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # data is shuffled without torch
    from torch import Tensor


def derive_seed(seed: int, name: str) -> int:
    """Derives a generator seed for a name, unrelated to the seeds for other names."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def token_bits(
    seed: int, name: str, sequence_ids: npt.NDArray[np.int64], position_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Returns 32 random bits for each position of each sequence, unrelated to those for other names."""
    start = np.uint64(derive_seed(seed, name))
    bits = start + (sequence_ids.astype(np.uint64)[:, None] << np.uint64(32)) + position_ids.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return (bits >> np.uint64(32)).astype(np.int64)


def hash_u32(bits: Tensor) -> Tensor:
    """Hashes unsigned 32-bit integers, stored as int64, with the finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = bits & 0xFFFFFFFF
        bits = (bits ^ (bits >> shift)) * factor
    bits = bits & 0xFFFFFFFF
    return bits ^ (bits >> 16)
