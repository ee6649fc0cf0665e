"""Packed sequences, shuffled and mixed: the content of a batch is a function of the seed and the step. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from titanlike.config import UserError
from titanlike.config.layout import BatchSizes, Ramp
from titanlike.data.batches.shuffle import Mixture, shuffled_epochs
from titanlike.data.documents.data_files import hash_of
from titanlike.data.tokens.arrays import Flags, Numbers, TokenArray
from titanlike.data.tokens.tokenizer import Separator

Position = list[Any]  # JSON: one entry per reader or rank, each of which starts with the number of that reader or rank

SCHEDULED_STEPS = 16  # steps whose sequences are chosen in one vectorized call


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences of one rank. Each has one extra token, the last label."""

    sequence_ids: Numbers  # (N,) index in the unbounded sequence stream; seeds dropout
    tokens: Numbers  # (N, T + 1)
    loss_mask: Flags | None = None  # (N, T + 1) True where a token is a label; None: everywhere
    document_ids: Numbers | None = (
        None  # (N, T + 1) masks attention between documents; None: as `data.document_masks` says
    )
    others: Mapping[str, Any] = field(
        default_factory=dict
    )  # further arrays (N, T, ...), which a program reads from a batch
    labels: Numbers | None = None  # (N, T), without a `loss_mask`; None: the next token


class BatchSource(Protocol):
    """Provides the sequences of each training step."""

    seq_len: int

    @property
    def fingerprint(self) -> str:
        """Identifies the data; a resume on data with another fingerprint is refused."""

    def describe(self, steps: int) -> str:
        """Summarizes the data and how much of it `steps` steps read."""

    def load_position(self, position: Position | None) -> None:
        """Restores a position from a checkpoint, merged over all ranks; None: the start."""

    def read(self, step: int, rows: range) -> SequenceBatch:
        """Returns these rows of the global batch of `step`, which counts from 1."""

    def position(self) -> Position | None:
        """Returns the state after the last `read`, or None if the step number is the only state."""


class Sequences(NamedTuple):
    """Sequences of a dataset: the fields of `SequenceBatch` without the ids."""

    tokens: Numbers
    loss_mask: Flags | None = None
    document_ids: Numbers | None = None
    others: Mapping[str, Any] = {}


class SequenceDataset(Protocol):
    """A random-access collection of sequences of equal length."""

    name: str
    seq_len: int
    num_sequences: int

    @property
    def fingerprint(self) -> str:
        """Identifies the sequences."""

    @property
    def contents(self) -> str:
        """What the dataset holds, for the summary of a run."""

    def read(self, indices: Numbers) -> Sequences:
        """Returns the sequences at these indices."""


class PackedDataset:
    """Cuts a token array into sequences. Every `holdout_every`-th sequence is held out for validation."""

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
        self.holdout_every = holdout_every
        total = max((tokens.num_tokens - 1) // seq_len, 0)  # a sequence needs one extra token, its last label
        num_held_out = total // holdout_every if holdout_every else 0
        self.num_sequences = num_held_out if held_out else total - num_held_out
        if self.num_sequences < 1:
            raise UserError(
                f"{name} has {tokens.num_tokens} tokens, too few for {'held-out ' if held_out else ''}sequences of "
                f"training.seq_len = {seq_len}" + (f" with one in {holdout_every} held out" if holdout_every else "")
            )

    @property
    def fingerprint(self) -> str:
        return self.tokens.fingerprint

    @property
    def contents(self) -> str:
        return f"{self.tokens.num_tokens:,} tokens"

    def read(self, indices: Numbers) -> Sequences:
        if self.held_out and self.holdout_every:
            indices = indices * self.holdout_every + self.holdout_every - 1
        elif self.holdout_every:
            indices = indices + indices // (self.holdout_every - 1)
        starts, length = indices * self.seq_len, self.seq_len + 1
        return Sequences(self.tokens.read(starts, length), self.tokens.loss_mask(starts, length))


class ShuffledMixture:
    """An unbounded, shuffled stream over datasets of sequences, each with its own epochs. Any step can be read at any time."""

    def __init__(
        self,
        datasets: Sequence[SequenceDataset],
        weights: Sequence[float] = (1.0,),
        *,
        seed: int,
        global_batch_size: int,
        batch_ramp: Ramp = (),
    ) -> None:
        self.datasets = datasets
        self.seq_len = datasets[0].seq_len
        self.batch_sizes = BatchSizes(global_batch_size, batch_ramp)
        # The first dataset keeps the plain seed, so a mixture of one equals that dataset alone.
        self.seeds = [seed + number * 0x9E3779B9 for number in range(len(datasets))]
        self.weights = list(weights)
        self.mixture = Mixture(weights, seed)
        self._scheduled_for = (range(0), range(0))  # steps and rows

    @property
    def fingerprint(self) -> str:
        fingerprints = [data.fingerprint for data in self.datasets]
        return fingerprints[0] if len(fingerprints) == 1 else hash_of([fingerprints, self.weights])

    @property
    def num_distinct(self) -> int:
        """Number of global batches before a sequence repeats, at least 1."""
        before_repeat = [data.num_sequences / share for data, share in zip(self.datasets, self.shares, strict=True)]
        return max(1, int(min(before_repeat)) // self.batch_sizes.final)

    @property
    def shares(self) -> list[float]:
        """Fraction of the sequences that come from each dataset."""
        return [float(share) for share in self.mixture.shares]

    def epochs(self, steps: int) -> list[float]:
        """Returns how many epochs of each dataset `steps` steps read."""
        total = self.batch_sizes.through(steps)
        return [total * share / data.num_sequences for data, share in zip(self.datasets, self.shares, strict=True)]

    def describe(self, steps: int) -> str:
        parts = []
        for dataset, share, epochs in zip(self.datasets, self.shares, self.epochs(steps), strict=True):
            prefix = f"{dataset.name} {100 * share:.3g}%, " if len(self.datasets) > 1 else ""
            plural = "" if f"{epochs:.2g}" == "1" else "s"
            parts.append(f"{prefix}{dataset.contents} read {epochs:.2g} time{plural}")
        return "; ".join(parts)

    def load_position(self, position: Position | None) -> None:
        """Does nothing: the step number is the only state."""

    def position(self) -> None:
        return None

    def read(self, step: int, rows: range) -> SequenceBatch:
        if step not in self._scheduled_for[0] or rows != self._scheduled_for[1]:
            self._schedule(step, rows)
        offset = step - self._scheduled_for[0].start
        sequence_ids, sources, indices = (values[offset] for values in self._scheduled)
        if len(self.datasets) == 1:
            return SequenceBatch(sequence_ids, *self.datasets[0].read(indices))
        tokens, document_ids = np.zeros((2, len(rows), self.seq_len + 1), np.int64)
        loss_mask = np.ones(tokens.shape, bool)
        masked = has_documents = False
        others: dict[str, Any] = {}
        for source in np.unique(sources).tolist():
            selected = sources == source
            tokens[selected], flags, documents, source_others = self.datasets[source].read(indices[selected])
            for name, values in source_others.items():
                others.setdefault(name, np.zeros((len(rows), *values.shape[1:]), values.dtype))[selected] = values
            if flags is not None:
                loss_mask[selected], masked = flags, True
            if documents is not None:
                document_ids[selected], has_documents = documents, True
        return SequenceBatch(
            sequence_ids, tokens, loss_mask if masked else None, document_ids if has_documents else None, others
        )

    def _schedule(self, step: int, rows: range) -> None:
        """Chooses the sequences of a step and of those that follow: their ids, source datasets and indices there, (S, N) each.

        One call for many steps, because for a few sequences numpy's call overhead exceeds the time to read them."""
        stage, size = self.batch_sizes.constant_around(step)
        steps = range(step, min(step + SCHEDULED_STEPS, stage.stop))
        first_ids = self.batch_sizes.through(step - 1) + size * np.arange(len(steps))
        sequence_ids = first_ids[:, None] + np.array(rows)
        sources, offsets = self.mixture.pick(sequence_ids.ravel())
        indices = np.empty_like(offsets)
        for source, dataset in enumerate(self.datasets):
            selected = sources == source
            indices[selected] = shuffled_epochs(offsets[selected], dataset.num_sequences, self.seeds[source])
        self._scheduled_for = (steps, rows)
        self._scheduled = sequence_ids, sources.reshape(sequence_ids.shape), indices.reshape(sequence_ids.shape)


def separate_documents(tokens: Numbers, separator: Separator) -> Numbers:
    """Returns the document index of each token in its sequence (N, T), by the separators in it."""
    starts = tokens == separator.token
    if separator.closes:
        starts[:, 1:] = starts[:, :-1]
    starts[:, 0] = False
    return starts.cumsum(1)


def positions_in_documents(document_ids: Numbers) -> Numbers:
    """Returns the position of each token in its document (N, T)."""
    starts = np.diff(document_ids, axis=1, prepend=document_ids[:, :1]) != 0
    offsets = np.arange(document_ids.shape[1])
    return offsets - np.maximum.accumulate(np.where(starts, offsets, 0), axis=1)
