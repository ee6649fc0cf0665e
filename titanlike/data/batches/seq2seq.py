"""Inputs and targets of encoder-decoders: corrupted spans of text, or pairs of texts. No torch."""

from functools import partial
from typing import Any

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Data
from titanlike.config.seq2seq import Seq2Seq
from titanlike.data.batches import sources
from titanlike.data.batches.chats import open_items
from titanlike.data.batches.packed_dataset import Sequences
from titanlike.data.batches.sources import Sources
from titanlike.data.batches.span_corruption import SpanCorruptedSource, sentinels, shifted_right
from titanlike.data.tokens.arrays import Numbers
from titanlike.data.tokens.chats import TokenizedChats
from titanlike.data.tokens.text_pairs import open_text_pairs
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.losses import IGNORE

OPEN_BINS = 64  # sequences that the next pair may join
PADDING = -1  # the number of the pair of padding in an input


def open_sources(
    section: Data,
    tokenizer: Tokenizer,
    *,
    seq2seq: Seq2Seq,
    vocab_size: int,
    start: int,
    target_len: int,
    seq_len: int,
    seed: int,
    **options: Any,
) -> Sources:
    """Opens text as `sources.open_sources` does, and corrupts spans of it; the same spans of held-out text each time. With
    `data.prompt_field`, it opens pairs. `start` is the token that the decoder starts with."""
    if tokenizer.eos is None:
        raise UserError("tokenizer.special = 'bos': inputs and targets end with an EOS token; set it to 'eos'")
    if section.prompt_field:
        pack = partial(PackedTextPairs, seq_len=seq_len, target_len=target_len, eos=tokenizer.eos, start=start)
        open_path = partial(open_text_pairs, section, tokenizer=tokenizer, prefix=seq2seq.source_prefix)
        return open_items(section, open_path, pack, seed=seed, **options)
    spans = seq2seq.spans(seq_len)
    raw = spans.raw_len - 1  # and a last label
    opened = sources.open_sources(section, tokenizer, seq_len=raw, seed=seed, **options)
    tokens = sentinels(tokenizer, spans.num_spans, vocab_size)
    training, validation = (
        source
        and SpanCorruptedSource(source, spans, tokens, eos=tokenizer.eos, start=start, target_len=target_len, seed=seed)
        for source in (opened.training, opened.validation)
    )
    assert training
    return Sources(training, validation)


class PackedTextPairs:
    """Sequences of pairs: as many in one as fit into its input and into its target. Every `holdout_every`-th pair is held out.

    The tokens of pair number 0, 1, ... of a sequence have this number as their document id. Padding of an input has another one.
    Padding of a target, to which no earlier token attends, has the number of the last pair, so that it attends to something.
    """

    def __init__(
        self,
        pairs: TokenizedChats,
        name: str = "the data",
        *,
        seq_len: int,
        target_len: int,
        eos: int,
        start: int,
        held_out: bool = False,
        holdout_every: int = 0,
    ) -> None:
        self.pairs, self.name, self.seq_len, self.target_len = pairs, name, seq_len, target_len
        self.eos, self.start = eos, start
        numbers = np.arange(len(pairs))
        if holdout_every:
            numbers = numbers[(numbers % holdout_every == holdout_every - 1) == held_out]
        if not len(numbers):
            raise UserError(
                f"{name} has no pair for {'validation' if held_out else 'training'}: {len(pairs)} in all"
                + (f", one in {holdout_every} held out; reduce data.holdout_every" if holdout_every else "")
            )
        firsts = np.concatenate([[0], pairs.ends])[:-1]
        num_targets = np.add.reduceat(pairs.labels.astype(np.int64), firsts)
        # Offsets of input and target, and their lengths.
        self.offsets = np.stack([firsts, pairs.ends - num_targets], axis=1)
        lengths = np.stack([pairs.ends - num_targets - firsts, num_targets], axis=1)
        self.lengths = np.minimum(lengths, (seq_len, target_len))
        self.is_truncated = self.lengths < lengths
        self.num_pairs, self.num_truncated = len(numbers), int(self.is_truncated[numbers].any(1).sum())
        self.num_tokens = self.lengths[numbers].sum(0)
        self.bins = [numbers[group] for group in pack_two(self.lengths[numbers], (seq_len, target_len))]
        self.num_sequences = len(self.bins)

    @property
    def fingerprint(self) -> str:
        return self.pairs.fingerprint

    @property
    def contents(self) -> str:
        full = 100 * self.num_tokens / (self.num_sequences * np.array([self.seq_len, self.target_len]))
        notes = (self.num_truncated, "truncated"), (self.pairs.skipped, "skipped as bad")
        return (
            f"{self.num_pairs:,} pairs of {self.num_tokens[0]:,} and {self.num_tokens[1]:,} tokens in {self.num_sequences:,} "
            f"sequences, inputs {full[0]:.0f}% and targets {full[1]:.0f}% full"
            + "".join(f", {number:,} {note}" for number, note in notes if number)
            + ","
        )

    def read(self, indices: Numbers) -> Sequences:
        count = len(indices)
        tokens = np.full((count, self.seq_len + 1), self.start, np.int64)
        labels = np.full((count, self.target_len), IGNORE, np.int64)
        decoder_tokens = np.full(labels.shape, self.start, np.int64)
        documents = np.full((count, self.seq_len), PADDING, np.int64)
        decoder_documents = np.zeros(labels.shape, np.int64)
        for row, index in enumerate(indices.tolist()):
            offsets = [0, 0]
            for number, pair in enumerate(self.bins[index]):
                source, target = (self._read(pair, side) for side in (0, 1))
                ends = [offset + len(each) for offset, each in zip(offsets, (source, target), strict=True)]
                tokens[row, offsets[0] : ends[0]], documents[row, offsets[0] : ends[0]] = source, number
                here = slice(offsets[1], ends[1])
                labels[row, here], decoder_tokens[row, here] = target, shifted_right(target[None], self.start)[0]
                decoder_documents[row, offsets[1] :] = number
                offsets = ends
        others = {"decoder_tokens": decoder_tokens, "decoder_document_ids": decoder_documents}
        # These labels replace the labels that would follow from the inputs.
        return Sequences(tokens, others=others | {"labels": labels, "document_ids": documents})

    def _read(self, pair: int, side: int) -> Numbers:
        start, length = self.offsets[pair, side], self.lengths[pair, side]
        tokens = self.pairs.tokens[start : start + length].astype(np.int64)
        if self.is_truncated[pair, side]:
            tokens[-1] = self.eos
        return tokens


def pack_two(lengths: Numbers, capacity: tuple[int, int]) -> list[list[int]]:
    """Distributes items with two lengths (N, 2) over bins, each item to the first of the last bins into which it fits, the longest
    first. Returns the items of each bin, in their order."""
    bins: list[list[int]] = []
    room = np.zeros((0, 2), np.int64)  # of the last bins
    for item in np.argsort(-(lengths / np.array(capacity)).max(1), kind="stable").tolist():
        fits = np.flatnonzero((room >= lengths[item]).all(1))
        at = int(fits[0]) if len(fits) else len(room)
        if not len(fits):
            bins.append([])
            room = np.concatenate([room, [capacity]])[-OPEN_BINS:]
            at = len(room) - 1
        bins[len(bins) - len(room) + at].append(item)
        room[at] -= lengths[item]
    return [sorted(group) for group in bins]
