"""Token rows cut into sequences, shuffled and mixed: what is read is a function of the seed and the step. No torch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.data.shuffle import Mixture, Numbers, epochs
from titanlike.data.text.tokenizer import Separator

Flags = npt.NDArray[np.bool_]

FORESEEN = 16  # steps whose order is found at once


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences for one rank, each with one token more for its last label."""

    numbers: Numbers  # of the sequences in the endless stream (N,)
    tokens: Numbers  # (N, T + 1)
    loss_mask: Flags | None = None  # which of them are labels (N, T + 1); None: all


class BatchSource(Protocol):
    """What batches are made of."""

    seq_len: int

    def describe(self, steps: int) -> str:
        """What there is, for people, and how much of it so many steps read."""

    def begin(self, position: list[Any] | None) -> None:
        """Go on from what all ranks' `position` was."""

    def rows(self, step: int, mine: range) -> SequenceBatch:
        """These rows of the global batch of a step, counted from 1."""

    def position(self) -> list[Any] | None:
        """What it takes, besides the step, to go on after the last rows that were asked for; None: nothing."""


class TokenArray(Protocol):
    """Tokens that can be read from any place."""

    @property
    def num_tokens(self) -> int:
        """How many there are."""

    @property
    def fingerprint(self) -> str:
        """Equal for the same tokens."""

    def read(self, starts: Numbers, length: int) -> Numbers:
        """So many tokens from each of these places (N, length)."""

    def loss_mask(self, starts: Numbers, length: int) -> Flags | None:
        """Which of these are learnt (N, length); None if all are."""


class InMemoryTokens:
    """Tokens in an array."""

    def __init__(self, tokens: npt.NDArray[Any]) -> None:
        self.tokens = tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens).data).hexdigest()[:16]

    def read(self, starts: Numbers, length: int) -> Numbers:
        found = np.empty((len(starts), length), np.int64)
        for row, start in enumerate(starts.tolist()):
            found[row] = self.tokens[start : start + length]
        return found

    def loss_mask(self, starts: Numbers, length: int) -> Flags | None:
        return None


class PackedDataset:
    """A row of tokens cut into sequences, some of them held out, evenly spread."""

    def __init__(
        self,
        tokens: TokenArray,
        seq_len: int,
        *,
        held_out: bool = False,
        holdout_every: int = 0,
        name: str = "the data",
    ) -> None:
        self.tokens = tokens
        self.name = name
        self.seq_len = seq_len
        self.held_out = held_out
        self.period = holdout_every  # the last of every so many windows is held out; 0 means none
        total = (tokens.num_tokens - 1) // seq_len  # a window needs one token more, for its last label
        reserved = max(total, 0) // self.period if self.period else 0
        self.count = reserved if held_out else total - reserved
        if self.count < 1:
            raise UserError(
                f"{name} has {tokens.num_tokens} tokens, too few for {'validation' if held_out else 'training'} sequences of "
                f"training.seq_len = {seq_len}" + (f" with one in {self.period} held out" if self.period else "")
            )

    def read(self, indices: Numbers) -> tuple[Numbers, Flags | None]:
        """Windows of seq_len + 1 tokens (N, T + 1), and which of them are learnt."""
        if self.held_out and self.period:
            indices = indices * self.period + self.period - 1
        elif self.period:
            indices = indices + indices // (self.period - 1)
        starts, length = indices * self.seq_len, self.seq_len + 1
        return self.tokens.read(starts, length), self.tokens.loss_mask(starts, length)


class ShuffledMixture:
    """Windows of one or more rows of tokens in an endless order, each row's once an epoch of its own."""

    def __init__(
        self,
        parts: Sequence[PackedDataset],
        weights: Sequence[float] = (1.0,),
        *,
        seed: int,
        global_batch_size: int,
    ) -> None:
        self.parts = parts
        self.seq_len = parts[0].seq_len
        self.global_batch_size = global_batch_size
        # The first keeps the plain seed: a mixture of one is no mixture.
        self.seeds = [seed + number * 0x9E3779B9 for number in range(len(parts))]
        self.mixture = Mixture(weights, seed)
        self._known: tuple[tuple[int, range], tuple[Numbers, Numbers, Numbers]] | None = None

    @property
    def num_distinct(self) -> int:
        """How many of the first global batches have no window twice; at least one."""
        reached = [part.count * sum(self.mixture.counts) // share for part, share in self._shared]
        return max(1, min(reached) // self.global_batch_size)

    def epochs(self, steps: int) -> list[float]:
        """How often each part is read in so many steps."""
        total = steps * self.global_batch_size / sum(self.mixture.counts)
        return [total * share / part.count for part, share in self._shared]

    def describe(self, steps: int) -> str:
        found = [f"{part.tokens.num_tokens:,} tokens" for part in self.parts]
        if len(found) > 1:
            shares = [share / sum(self.mixture.counts) for share in self.mixture.counts]
            found = [
                f"{part.name} {share:.0%}, {text}" for part, share, text in zip(self.parts, shares, found, strict=True)
            ]
        each = zip(found, self.epochs(steps), strict=True)
        return "; ".join(
            f"{text} read {epochs:.2g} time{'' if f'{epochs:.2g}' == '1' else 's'}" for text, epochs in each
        )

    def begin(self, position: list[Any] | None) -> None:
        pass

    def rows(self, step: int, mine: range) -> SequenceBatch:
        numbers, stream, windows = (found[(step - 1) % FORESEEN] for found in self._order((step - 1) // FORESEEN, mine))
        if len(self.parts) == 1:
            return SequenceBatch(numbers, *self.parts[0].read(windows))
        tokens = np.empty((len(numbers), self.seq_len + 1), np.int64)
        loss_mask: Flags | None = None
        for number, part in enumerate(self.parts):
            there = np.flatnonzero(stream == number)
            if not len(there):
                continue
            tokens[there], flags = part.read(windows[there])
            if flags is not None:
                loss_mask = np.ones(tokens.shape, bool) if loss_mask is None else loss_mask
                loss_mask[there] = flags
        return SequenceBatch(numbers, tokens, loss_mask)

    def _order(self, block: int, mine: range) -> tuple[Numbers, Numbers, Numbers]:
        """For each of some steps (S, N): the numbers of this rank's sequences, from which part each is, and which window there.
        Of several steps at once: of one, with few sequences, it would take longer than to read them."""
        if self._known is None or self._known[0] != (block, mine):
            steps = np.arange(block * FORESEEN, (block + 1) * FORESEEN)[:, None]
            numbers = steps * self.global_batch_size + np.array(mine)
            stream, places = self.mixture.pick(numbers.ravel())
            windows = np.empty_like(places)
            for number, part in enumerate(self.parts):
                there = stream == number
                windows[there] = epochs(places[there], part.count, self.seeds[number])
            self._known = (block, mine), (numbers, stream.reshape(numbers.shape), windows.reshape(numbers.shape))
        return self._known[1]

    def position(self) -> None:
        return None

    @property
    def _shared(self) -> list[tuple[PackedDataset, int]]:
        return list(zip(self.parts, self.mixture.counts, strict=True))


def document_ids_and_positions(tokens: Numbers, separator: Separator) -> tuple[Numbers, Numbers]:
    """For tokens (N, T): which document of its window each belongs to, and its place in it."""
    begins = tokens == separator.token
    if separator.closes:
        begins[:, 1:] = begins[:, :-1]
    begins[:, 0] = False
    places = np.arange(tokens.shape[1])
    return begins.cumsum(1), places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
