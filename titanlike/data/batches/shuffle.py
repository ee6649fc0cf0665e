"""Stateless shuffling and mixing: the element at any index is computed without a permutation in memory. No torch."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from titanlike.data.tokens.arrays import Numbers
from titanlike.utils.counter_rng import derive_seed

CYCLE = 1024  # least length of the blocks after which a mixture has its exact shares


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
    """Interleaves streams: after each block of `length` elements, each stream has had its exact share, rounded to one element.

    torchdata's MultiNodeWeightedSampler is not used: it draws with torch.multinomial from a seed per rank, so its shares
    hold only on average and its order depends on the number of ranks.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        total = sum(map(Fraction, weights))
        self.shares = [Fraction(weight) / total for weight in weights]
        self.seed = seed
        # In a block, each other stream has less than one element more than its share. The largest stream has room for them.
        self.length = max(CYCLE, 1 << (len(weights) ** 2 - 1).bit_length())

    def pick(self, offsets: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the stream of each offset of the mixture, and the offset in that stream."""
        if len(self.shares) == 1:
            return np.zeros_like(offsets), offsets
        blocks, indices = np.divmod(offsets, self.length)
        streams, inner_offsets = np.empty_like(offsets), np.empty_like(offsets)
        for block in np.unique(blocks).tolist():
            selected = blocks == block
            starts, ends = self._counts(block), self._counts(block + 1)
            permutation = shuffled(np.arange(self.length), self.length, derive_seed(self.seed, f"mixture {block}"))
            counts = [end - start for start, end in zip(starts, ends, strict=True)]
            pattern = np.repeat(np.arange(len(counts)), counts)[permutation]
            inner = np.empty(self.length, np.int64)
            inner[np.argsort(pattern, kind="stable")] = np.concatenate(list(map(np.arange, starts, ends)))
            streams[selected], inner_offsets[selected] = pattern[indices[selected]], inner[indices[selected]]
        return streams, inner_offsets

    def _counts(self, blocks: int) -> list[int]:
        """Returns the number of elements of each stream in the first blocks. The largest stream gets what rounding leaves."""
        size = blocks * self.length
        counts = [(2 * size * share.numerator + share.denominator) // (2 * share.denominator) for share in self.shares]
        counts[self.shares.index(max(self.shares))] += size - sum(counts)
        return counts


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hashes 64-bit integers (the splitmix64 finalizer)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
