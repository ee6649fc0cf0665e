"""Best-fit packing: sequences of whole documents, or of whole conversations. No torch."""

import bisect
from typing import NamedTuple

import numpy as np

from titanlike.config import UserError
from titanlike.data.batches.packed_dataset import Sequences
from titanlike.data.documents.data_files import hash_of
from titanlike.data.tokens.arrays import Numbers
from titanlike.data.tokens.shards import Shards
from titanlike.data.tokens.tokenizer import Separator


class Bins(NamedTuple):
    """A distribution of items over bins."""

    items: Numbers  # the items of each bin, one bin after the other
    ends: Numbers  # index in `items` after the last one of each bin

    def __len__(self) -> int:
        return len(self.ends)

    def split(self) -> list[Numbers]:
        """Returns the items of each bin."""
        return np.split(self.items, self.ends[:-1]) if len(self.ends) else []


def pack(lengths: Numbers, capacity: int) -> Bins:
    """Distributes items over as few bins as best fit, from the longest to the shortest, needs.

    An item goes to the bin with the least room that is enough for it, of several the first one. All items of one length are
    distributed at once: a bin takes as many as it has room for before the next one does.
    """
    bins = np.empty(len(lengths), np.int64)
    room_of: dict[int, list[Numbers]] = {}  # numbers of the bins that have this room
    rooms: list[int] = []  # ascending
    num_bins = 0
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    stops = np.flatnonzero(np.diff(sorted_lengths, append=-1)) + 1
    start = 0
    for stop in stops.tolist():
        length = int(sorted_lengths[start])
        while start < stop:
            at = bisect.bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            per_bin = room // length
            wanted = -(-(stop - start) // per_bin)
            if at < len(rooms):
                chosen, rest = np.split(np.sort(np.concatenate(room_of.pop(rooms.pop(at)))), [wanted])
                _add(rooms, room_of, room, rest)
            else:
                chosen = np.arange(num_bins, num_bins + wanted)
                num_bins += wanted
            count = min(len(chosen) * per_bin, stop - start)
            bins[order[start : start + count]] = np.repeat(chosen, per_bin)[:count]
            start += count
            in_last = count - (len(chosen) - 1) * per_bin
            _add(rooms, room_of, room - per_bin * length, chosen[:-1])
            _add(rooms, room_of, room - in_last * length, chosen[-1:])
    by_bin = order[np.argsort(bins[order], kind="stable")]  # in a bin, from the longest to the shortest
    return Bins(by_bin, np.cumsum(np.bincount(bins, minlength=num_bins)))


def _add(rooms: list[int], room_of: dict[int, list[Numbers]], room: int, bins: Numbers) -> None:
    if not room or not len(bins):
        return
    if room not in room_of:
        bisect.insort(rooms, room)
        room_of[room] = []
    room_of[room].append(bins)


class BestFitDataset:
    """Sequences of the documents of shards, packed by best fit and padded. Every `holdout_every`-th sequence is held out.

    A document with more tokens than a sequence is cut into sequences, each of which begins with the last label of the one before,
    and a rest, which is packed. All others stay whole.
    """

    def __init__(
        self,
        tokens: Shards,
        seq_len: int,
        separator: Separator,
        *,
        separate: bool = False,
        held_out: bool = False,
        holdout_every: int = 0,
        name: str = "the data",
    ) -> None:
        """`separate` gives the sequences the ids of their documents, for the attention mask."""
        self.tokens, self.name, self.seq_len = tokens, name, seq_len
        self.separator, self.separate = separator, separate
        lengths = np.concatenate([np.empty(0, np.int64), *map(tokens.document_lengths, tokens.shards)])
        self.num_documents, self.num_cut = len(lengths), int((lengths > seq_len + 1).sum())
        # Pieces of documents: all but the last of a document are complete sequences.
        counts = np.maximum(-(-(lengths - 1) // seq_len), 1)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        offsets = (np.arange(counts.sum()) - first) * seq_len
        self.starts = np.repeat(np.cumsum(lengths) - lengths, counts) + offsets
        self.lengths = np.minimum(np.repeat(lengths, counts) - offsets, seq_len + 1)
        self.continues = offsets > 0  # its first token was a label of the piece before
        self.bins = pack(self.lengths, seq_len + 1)
        total = len(self.bins)
        num_held_out = total // holdout_every if holdout_every else 0
        self.held_out, self.holdout_every = held_out, holdout_every
        self.num_sequences = num_held_out if held_out else total - num_held_out
        if self.num_sequences < 1:
            raise UserError(
                f"{name} has {total} sequences of whole documents, too few"
                + (
                    f" with one in {holdout_every} held out; reduce data.holdout_every, or give"
                    if holdout_every
                    else "; give"
                )
                + " more data"
            )

    @property
    def fingerprint(self) -> str:
        return hash_of([self.tokens.fingerprint, "best_fit"])

    @property
    def contents(self) -> str:
        num_tokens = int(self.lengths.sum())
        filled = 100 * num_tokens / (len(self.bins) * (self.seq_len + 1))
        return (
            f"{self.tokens.num_tokens:,} tokens in {len(self.bins):,} sequences of whole documents, {filled:.1f}% full, "
            f"{self.num_cut:,} of {self.num_documents:,} documents cut,"
        )

    def read(self, indices: Numbers) -> Sequences:
        if self.held_out and self.holdout_every:
            indices = indices * self.holdout_every + self.holdout_every - 1
        elif self.holdout_every:
            indices = indices + indices // (self.holdout_every - 1)
        width = self.seq_len + 1
        ends = self.bins.ends[indices]
        counts = ends - np.where(indices > 0, self.bins.ends[indices - 1], 0)  # pieces of each sequence
        row_ends = np.cumsum(counts)
        numbers = np.arange(row_ends[-1]) - np.repeat(row_ends - counts, counts)  # of the pieces in their sequence
        pieces = self.bins.items[numbers + np.repeat(ends - counts, counts)]
        starts, lengths = self.starts[pieces], self.lengths[pieces]
        # Index of the first token of each piece in the result.
        before = np.cumsum(lengths) - lengths
        rows = np.repeat(np.arange(len(indices)), counts)
        firsts = rows * width + before - np.repeat(before[row_ends - counts], counts)
        places = np.arange(lengths.sum()) + np.repeat(firsts - before, lengths)
        tokens = np.full(len(indices) * width, self.separator.token, np.int64)
        tokens[places] = self.tokens.read_pieces(starts, lengths)
        loss_mask = np.zeros(len(tokens), bool)
        loss_mask[places] = True if not self.tokens.has_prompts else self.tokens.loss_mask_of_pieces(starts, lengths)
        loss_mask[firsts[self.continues[pieces]]] = False
        sequences = Sequences(tokens.reshape(-1, width), loss_mask.reshape(-1, width))
        if not self.separate:
            return sequences
        document_ids = np.repeat(counts, width)  # of the padding
        document_ids[places] = np.repeat(numbers, lengths)
        return sequences._replace(document_ids=document_ids.reshape(-1, width))
