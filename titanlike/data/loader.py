"""Batches as a function of (seed, step): the order of the data does not depend on the layout, and has no state to save."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titanlike.config import UserError
from titanlike.data.sources import Tokens
from titanlike.noise import seed_of


@dataclass(frozen=True)
class Batch:
    """What one rank takes through the model at once."""

    inputs: dict[str, Tensor]  # `tokens`, their `positions` and, for dropout, `noise`: each (B, T)
    labels: Tensor  # (B, T): the next token at each place


class Windows:
    """Tokens cut into sequences of one length, some of them held out, evenly spread."""

    def __init__(self, tokens: Tokens, seq_len: int, *, held_out: bool, validation_every: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.held_out = held_out
        self.period = validation_every  # the last of every so many windows is held out; 0 means none
        total = (len(tokens) - 1) // seq_len  # a window needs one token more, for its last label
        reserved = total // self.period if self.period else 0
        self.count = reserved if held_out else total - reserved
        if not self.count:
            raise UserError(
                f"the data has {len(tokens)} tokens, too few for {'validation' if held_out else 'training'} sequences of "
                f"training.seq_len = {seq_len}" + (f" with one in {self.period} held out" if self.period else "")
            )

    def read(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Windows of seq_len + 1 tokens (N, T + 1)."""
        if self.held_out:
            indices = indices * self.period + self.period - 1
        elif self.period:
            indices = indices + indices // (self.period - 1)
        places = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return self.tokens[places].astype(np.int64)


class Batches:
    """This rank's share of each global batch, in micro-batches."""

    def __init__(
        self,
        windows: Windows,
        *,
        global_batch_size: int,
        local_batch_size: int,
        data_rank: int,
        data_ranks: int,
        seed: int,
        device: torch.device,
        places: Tensor | None = None,
        noise: bool = False,
    ) -> None:
        """`places` are those of each sequence that this rank holds, all of them unless given."""
        self.windows = windows
        self.global_batch_size = global_batch_size
        self.local_batch_size = local_batch_size
        self.share = global_batch_size // data_ranks
        self.first = data_rank * self.share
        self.seed = seed
        self.device = device
        self.places = torch.arange(windows.seq_len) if places is None else places
        self.noise = noise

    def microbatches(self, step: int) -> list[Batch]:
        """What this rank trains on in a step, counted from 1."""
        start = (step - 1) * self.global_batch_size + self.first
        numbers = np.arange(start, start + self.share)  # of the sequences, in the endless stream
        sequences = torch.from_numpy(self.windows.read(self._order(numbers)))
        tensors = {
            "tokens": sequences[:, self.places],
            "labels": sequences[:, self.places + 1],
            "positions": self.places.repeat(self.share, 1),
        }
        if self.noise:
            tensors["noise"] = torch.from_numpy(_noise(self.seed, numbers, self.places.numpy()))
        if self.device.type == "cuda":
            tensors = {name: t.pin_memory().to(self.device, non_blocking=True) for name, t in tensors.items()}
        parts = [
            dict(zip(tensors, part, strict=True))
            for part in zip(*(t.split(self.local_batch_size) for t in tensors.values()), strict=True)
        ]
        return [Batch(labels=part.pop("labels"), inputs=part) for part in parts]

    def num_distinct(self, wanted: int) -> int:
        """How many of so many global batches have no window twice; at least one."""
        return max(1, min(wanted, self.windows.count // self.global_batch_size))

    def _order(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which window stands at each place of the endless stream: each epoch is shuffled in its own way."""
        count = self.windows.count
        return np.array(
            [shuffled(int(place % count), count, seed_of(self.seed, f"epoch {place // count}")) for place in places],
            dtype=np.int64,
        )


def shuffled(index: int, size: int, seed: int) -> int:
    """Where a seeded shuffle of `range(size)` puts `index`, without making the shuffle: four Feistel rounds.

    The rounds permute a power of four that is at least `size`; a result outside is sent round again until it is inside.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(4):
            left, right = right, left ^ (_mix(right + (number << half) + seed) & mask)
        index = left << half | right
        if index < size:
            return index


def _noise(seed: int, sequences: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """32 random bits for each place of each sequence of the stream."""
    start = np.uint64(seed_of(seed, "dropout"))
    bits = start + (sequences.astype(np.uint64)[:, None] << np.uint64(32)) + places.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return (bits >> np.uint64(32)).astype(np.int64)


def _mix(value: int) -> int:
    """Spread a number's bits over 64 others (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
