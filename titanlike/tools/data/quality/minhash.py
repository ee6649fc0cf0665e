"""MinHash signatures of texts, and the keys of their bands: documents that share a key are taken as near duplicates."""

from functools import cache

import numpy as np
import numpy.typing as npt

from titanlike.tools.data.quality.hashing import Hashes, Words, mix

BANDS, ROWS = (
    14,
    8,
)  # as FineWeb: a pair with similarity 0.75 shares a band with probability 0.77, one with 0.8 with 0.92

Signatures = npt.NDArray[np.uint32]


@cache
def _multipliers() -> npt.NDArray[np.uint32]:
    """Returns odd numbers. A product with one modulo 2**32 permutes the 32-bit shingles, which are uniformly distributed."""
    drawn = mix(np.arange(1, BANDS * ROWS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (drawn >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def signatures_of(shingles: Words) -> Signatures:
    """Returns the smallest permuted shingle of each text, for each permutation (N, BANDS * ROWS). Without shingles, it is the
    largest number."""
    multipliers = _multipliers()
    counts = np.diff(shingles.ends, prepend=0)
    values = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
    signatures = np.full((len(counts), len(multipliers)), np.iinfo(np.uint32).max, np.uint32)
    [filled] = np.nonzero(counts)
    if len(filled):
        starts = (shingles.ends - counts)[filled]
        for number, multiplier in enumerate(multipliers):
            signatures[filled, number] = np.minimum.reduceat(values * multiplier, starts)
    return signatures


def band_keys(signatures: Signatures) -> Hashes:
    """Returns the key of each band (N, BANDS). Keys of different bands differ."""
    rows = signatures.reshape(len(signatures), BANDS, ROWS).astype(np.uint64)
    keys = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), rows.shape[:2])
    for row in range(ROWS):
        keys = mix(keys * np.uint64(0x9E3779B97F4A7C15) + rows[:, :, row])
    return keys
