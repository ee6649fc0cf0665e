"""Stateless shuffling and mixing: the element at any index is computed without a permutation in memory. No torch."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from titanlike.utils.counter_rng import derive_seed

Numbers = npt.NDArray[np.int64]

CYCLE = 1024  # length of the blocks in which a mixture has its exact shares


def shuffled(indices: Numbers, size: int, seed: int) -> Numbers:
    """Maps `indices` through a seeded permutation of `range(size)`, computed by a four-round Feistel network.

    The network permutes a power of four that is at least `size`; results outside the range are mapped again (cycle walking).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    result = indices.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for number in range(4):
            key = np.uint64((number << int(half)) + seed & 0xFFFFFFFFFFFFFFFF)
            left, right = right, left ^ (_mix(right + key) & mask)
        result[outside] = left << half | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def shuffled_epochs(offsets: Numbers, size: int, seed: int) -> Numbers:
    """Returns the elements at `offsets` of an unbounded stream of epochs, each a different permutation of `range(size)`."""
    epochs, indices = np.divmod(offsets, size)
    result = np.empty_like(offsets)
    for epoch in np.unique(epochs).tolist():
        selected = epochs == epoch
        result[selected] = shuffled(indices[selected], size, derive_seed(seed, f"epoch {epoch}"))
    return result


class Mixture:
    """Interleaves streams: each aligned block of `CYCLE` elements has exactly the share of each stream.

    torchdata's MultiNodeWeightedSampler is not used: it draws with torch.multinomial from a seed per rank, so its shares
    hold only on average and its order depends on the number of ranks.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts = _counts(weights)
        self.seed = seed

    def pick(self, offsets: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the stream of each offset of the mixture, and the offset in that stream."""
        if len(self.counts) == 1:
            return np.zeros_like(offsets), offsets
        cycles, indices = np.divmod(offsets, CYCLE)
        streams, inner_offsets = np.empty_like(offsets), np.empty_like(offsets)
        for cycle in np.unique(cycles).tolist():
            selected = cycles == cycle
            permutation = shuffled(np.arange(CYCLE), CYCLE, derive_seed(self.seed, f"mixture {cycle}"))
            pattern = np.repeat(np.arange(len(self.counts)), self.counts)[permutation]
            inner = np.empty(CYCLE, np.int64)
            for stream, count in enumerate(self.counts):
                inner[pattern == stream] = np.arange(cycle * count, (cycle + 1) * count)
            streams[selected], inner_offsets[selected] = pattern[indices[selected]], inner[indices[selected]]
        return streams, inner_offsets


def _counts(weights: Sequence[float]) -> list[int]:
    """Rounds weights to positive integers that sum to `CYCLE`."""
    total = math.fsum(weights)
    exact = [weight / total * CYCLE for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    for _ in range(abs(CYCLE - sum(counts))):
        missing = [wanted - count for wanted, count in zip(exact, counts, strict=True)]
        if sum(counts) < CYCLE:
            counts[missing.index(max(missing))] += 1
        else:
            counts[counts.index(max(counts))] -= 1  # never reduces a count of 1 to 0
    return counts


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hashes 64-bit integers (the splitmix64 finalizer)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
