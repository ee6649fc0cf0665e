"""Preference pairs as sequences that keep both conversations of a pair together. No torch."""

from functools import partial
from typing import Any, Literal

import numpy as np

from titanlike.config import UserError
from titanlike.config.dpo import PreferenceData
from titanlike.data.batches.best_fit import pack
from titanlike.data.batches.chats import describe_packed, open_items
from titanlike.data.batches.packed_dataset import Sequences
from titanlike.data.batches.sources import Sources
from titanlike.data.tokens.arrays import Numbers
from titanlike.data.tokens.chat_template import build_chat_template
from titanlike.data.tokens.chats import TokenizedChats
from titanlike.data.tokens.preference_tokens import open_preferences
from titanlike.data.tokens.tokenizer import Tokenizer


def open_sources(section: PreferenceData, tokenizer: Tokenizer, *, seq_len: int, **options: Any) -> Sources:
    """Opens preference pairs as `sources.open_sources` opens plain text."""
    template = build_chat_template(section.chat_template, tokenizer)
    pack = partial(PackedPairs, tokenizer=tokenizer, seq_len=seq_len, too_long=section.long_chats)
    return open_items(section, partial(open_preferences, section, template=template), pack, **options)


class PackedPairs:
    """Sequences of whole pairs, packed by best fit and padded. Every `holdout_every`-th pair is held out.

    Each conversation is a document of its sequence. The chosen one of pair n has the document id 2n, and the rejected one, which
    follows it, 2n + 1. Padding has an even id of its own.
    """

    def __init__(
        self,
        pairs: TokenizedChats,
        name: str = "the data",
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        too_long: Literal["truncate", "skip"] = "truncate",
        held_out: bool = False,
        holdout_every: int = 0,
    ) -> None:
        self.pairs, self.first_pair, self.name, self.seq_len = pairs, pairs.first // 2, name, seq_len
        self.held_out, self.holdout_every = held_out, holdout_every
        self.num_pairs_in_all = len(pairs) // 2
        self.padding = tokenizer.separator.token
        numbers = np.arange(self.num_pairs_in_all)
        if holdout_every:
            numbers = numbers[(numbers % holdout_every == holdout_every - 1) == held_out]
        capacity = seq_len + 1  # the last token of a sequence is a label only
        starts = np.concatenate([[0], pairs.ends])[:-1]
        lengths = (pairs.ends - starts).reshape(-1, 2)
        is_long = lengths.sum(1) > capacity
        limits = np.maximum(capacity // 2, capacity - lengths.min(1))
        kept = np.minimum(lengths, np.where(is_long, limits, capacity)[:, None])
        num_labels = np.concatenate([[0], np.cumsum(pairs.labels)])
        first, last = starts.reshape(-1, 2), starts.reshape(-1, 2) + kept
        labels = num_labels[last] - num_labels[np.minimum(first + 1, last)]  # a first token is not predicted
        # What is left of a pair without one of the answers has nothing to learn.
        usable = (labels > 0).all(1) & ((too_long == "truncate") | ~is_long)
        self.num_skipped = int((~usable[numbers]).sum())
        numbers = numbers[usable[numbers]]
        # Conversations that differ only in what was cut teach nothing.
        is_equal = np.zeros(len(lengths), bool)
        for number in numbers[(is_long & (kept[:, 0] == kept[:, 1]))[numbers]].tolist():
            chosen, rejected = (pairs.tokens[start : start + kept[number, 0]] for start in first[number])
            is_equal[number] = np.array_equal(chosen, rejected)
        self.num_equal = int(is_equal.sum())
        numbers = numbers[~is_equal[numbers]]
        self.num_truncated = int(is_long[numbers].sum())
        self.num_pairs = len(numbers)
        self.num_tokens, self.num_labels = int(kept[numbers].sum()), int(labels[numbers].sum())
        self.starts, self.kept = first, kept
        # In order, so that the document ids of a sequence ascend: a block mask skips blocks by their range.
        self.bins = [np.sort(numbers[group]) for group in pack(kept[numbers].sum(1), capacity).split()]
        self.num_sequences = len(self.bins)
        if not self.bins:
            raise UserError(
                f"{name} has no preference pair for {'validation' if held_out else 'training'}: {self.num_pairs_in_all} in all"
                + (f", one in {holdout_every} held out" if holdout_every else "")
                + (
                    f", {self.num_skipped} that training.seq_len = {seq_len} leaves without an answer"
                    if self.num_skipped
                    else ""
                )
                + (f", {self.num_equal} equal after truncation" if self.num_equal else "")
                + ("; reduce data.holdout_every, or set validation.interval = 0" if held_out else "")
            )

    @property
    def fingerprint(self) -> str:
        return self.pairs.fingerprint

    @property
    def contents(self) -> str:
        return describe_packed(
            self.num_pairs, "preference pair", "answers", self.num_tokens, self.num_labels, self.num_sequences, self.seq_len,
            truncated=self.num_truncated, too_long=self.num_skipped, bad=self.pairs.skipped, equal=self.num_equal,
        )  # fmt: skip

    def read(self, indices: Numbers) -> Sequences:
        shape = len(indices), self.seq_len + 1
        tokens = np.full(shape, self.padding, np.int64)
        loss_mask = np.zeros(shape, bool)
        document_ids = np.full(shape, 2 * (self.first_pair + self.num_pairs_in_all), np.int64)
        for row, index in enumerate(indices.tolist()):
            offset = 0
            for pair in self.bins[index].tolist() if index < self.num_sequences else ():
                for side in (0, 1):
                    start, length = self.starts[pair, side], self.kept[pair, side]
                    source, target = slice(start, start + length), slice(offset, offset + length)
                    tokens[row, target], loss_mask[row, target] = self.pairs.tokens[source], self.pairs.labels[source]
                    document_ids[row, target] = 2 * (self.first_pair + pair) + side
                    offset = target.stop
        return Sequences(tokens, loss_mask, document_ids)
