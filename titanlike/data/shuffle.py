"""What stands at each place of an endless stream: shuffles and mixtures without a list of them in memory. No torch."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from titanlike.utils.counter_rng import derive_seed

Numbers = npt.NDArray[np.int64]

CYCLE = 1024  # places in which a mixture has its shares exactly


def shuffled(indices: Numbers, size: int, seed: int) -> Numbers:
    """Where a seeded shuffle of `range(size)` puts each of `indices`, without making the shuffle: four Feistel rounds.

    The rounds permute a power of four that is at least `size`; a result outside is sent round again until it is inside.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    found = indices.astype(np.uint64)
    outside = np.ones(len(found), bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for number in range(4):
            key = np.uint64((number << int(half)) + seed & 0xFFFFFFFFFFFFFFFF)
            left, right = right, left ^ (_mix(right + key) & mask)
        found[outside] = left << half | right
        outside = found >= np.uint64(size)
    return found.astype(np.int64)


def epochs(places: Numbers, size: int, seed: int) -> Numbers:
    """Which of `size` things stands at each place of an endless stream that has all of them once an epoch, each epoch in an
    order of its own."""
    number, place = np.divmod(places, size)
    found = np.empty_like(places)
    for epoch in np.unique(number).tolist():
        there = number == epoch
        found[there] = shuffled(place[there], size, derive_seed(seed, f"epoch {epoch}"))
    return found


class Mixture:
    """Several streams mixed into one: of any `CYCLE` places from a multiple of it on, each stream has its share."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts = _shares(weights)
        self.seed = seed

    def pick(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """For each place of the mixture: which stream it is taken from, and the place there."""
        if len(self.counts) == 1:
            return np.zeros_like(places), places
        cycles, inside = np.divmod(places, CYCLE)
        stream, before = np.empty_like(places), np.empty_like(places)
        for cycle in np.unique(cycles).tolist():
            there = cycles == cycle
            order = shuffled(np.arange(CYCLE), CYCLE, derive_seed(self.seed, f"mixture {cycle}"))
            pattern = np.repeat(np.arange(len(self.counts)), self.counts)[order]
            earlier = np.empty(CYCLE, np.int64)
            for number, count in enumerate(self.counts):
                earlier[pattern == number] = np.arange(cycle * count, (cycle + 1) * count)
            stream[there], before[there] = pattern[inside[there]], earlier[inside[there]]
        return stream, before


def _shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `CYCLE`, as near to the weights as can be, and none of them 0."""
    total = math.fsum(weights)
    exact = [weight / total * CYCLE for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    for _ in range(abs(CYCLE - sum(shares))):
        short = [wanted - share for wanted, share in zip(exact, shares, strict=True)]
        if sum(shares) < CYCLE:
            shares[short.index(max(short))] += 1
        else:
            shares[shares.index(max(shares))] -= 1  # a small one may not become 0
    return shares


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread numbers' bits over 64 others (the finalizer of splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
