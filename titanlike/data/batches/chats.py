"""Conversations as sequences that keep them whole, for fine-tuning. No torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from titanlike.config import UserError
from titanlike.config.finetune import ChatData
from titanlike.config.layout import Ramp
from titanlike.config.sections import Data
from titanlike.data.batches import best_fit, sources
from titanlike.data.batches.packed_dataset import SequenceDataset, Sequences, ShuffledMixture
from titanlike.data.batches.sources import Sources, paths_and_weights
from titanlike.data.tokens.arrays import Numbers
from titanlike.data.tokens.chat_template import ChatTemplate, build_chat_template
from titanlike.data.tokens.chats import TokenizedChats, describe_fields, open_chats
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.distributed import environment


def template_of(section: ChatData, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the template of a section's conversations; None if its data are plain text."""
    return build_chat_template(section.chat_template, tokenizer) if section.has_chats else None


def open_sources(section: Data, tokenizer: Tokenizer, *, seq_len: int, **options: Any) -> Sources:
    """Opens conversations as `sources.open_sources` opens plain text, or plain text if the section names that."""
    if not isinstance(section, ChatData) or not section.has_chats:
        return sources.open_sources(section, tokenizer, seq_len=seq_len, **options)
    template = build_chat_template(section.chat_template, tokenizer)
    pack = partial(PackedChats, tokenizer=tokenizer, seq_len=seq_len, too_long=section.long_chats)
    return open_items(section, partial(open_chats, section, template=template), pack, **options)


def open_items(
    section: Data,
    open_path: Callable[[str], TokenizedChats],
    pack: Callable[..., SequenceDataset],
    *,
    global_batch_size: int,
    seed: int,
    validate: bool,
    batch_ramp: Ramp = (),
) -> Sources:
    """Opens what stays whole in a sequence, such as conversations and pairs: `open_path` returns the tokens of a path, and `pack`
    the sequences of these. Items of a mixture are held out of each path."""
    mix = partial(ShuffledMixture, seed=seed, global_batch_size=global_batch_size)
    paths, weights = paths_and_weights(section)
    every = 0 if section.validation_path else section.holdout_every
    if validate and section.validation_path:
        paths = [*paths, section.validation_path]
    tokens = [open_path(path) for path in paths]
    if environment.rank_info().rank == 0 and (line := describe_fields(tokens)):
        print(line, flush=True)
    firsts = accumulate(map(len, tokens), initial=0)
    opened = [(replace(each, first=first), path) for each, first, path in zip(tokens, firsts, paths, strict=False)]
    training = mix(
        [pack(*each, holdout_every=every) for each in opened[: len(weights)]], weights, batch_ramp=batch_ramp
    )
    if not validate:
        return Sources(training)
    if section.validation_path:
        return Sources(training, mix([pack(*opened[-1])]))
    return Sources(training, mix([pack(*each, holdout_every=every, held_out=True) for each in opened], weights))


class PackedChats:
    """Sequences of whole conversations, packed by best fit and padded. Every `holdout_every`-th conversation is held out.

    Each conversation is a document of its sequence: attention does not leave it, and its positions count from 0. Only tokens of
    the assistant are labels. A conversation that its template renders as several documents is held out with all of them.
    """

    def __init__(
        self,
        chats: TokenizedChats,
        name: str = "the data",
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        too_long: Literal["truncate", "skip"] = "truncate",
        held_out: bool = False,
        holdout_every: int = 0,
    ) -> None:
        self.chats = chats
        self.name = name
        self.seq_len = seq_len
        self.padding = tokenizer.separator.token
        numbers = np.arange(len(chats))
        if holdout_every:
            numbers = numbers[(chats.records % holdout_every == holdout_every - 1) == held_out]
        capacity = seq_len + 1  # the last token of a sequence is a label only
        starts = np.concatenate([[0], chats.ends])[:-1]
        lengths = chats.ends - starts
        is_long = lengths > capacity
        num_labels = np.concatenate([[0], np.cumsum(chats.labels)])
        kept = np.minimum(lengths, capacity)
        # What is left of a conversation after a cut within its first prompt has nothing to learn. Nor is a first token predicted.
        usable = num_labels[starts + kept] > num_labels[np.minimum(starts + 1, starts + kept)]
        usable &= (too_long == "truncate") | ~is_long
        self.num_skipped = int((~usable[numbers]).sum())
        numbers = numbers[usable[numbers]]
        self.num_truncated = int(is_long[numbers].sum())
        self.num_chats, self.num_documents = len(np.unique(chats.records[numbers])), len(numbers)
        self.num_tokens = int(kept[numbers].sum())
        self.num_labels = int((num_labels[starts + kept] - num_labels[starts])[numbers].sum())
        self.starts, self.kept = starts, kept
        self.bins = [numbers[group] for group in best_fit.pack(kept[numbers], capacity).split()]
        self.num_sequences = len(self.bins)
        if not self.bins:
            raise UserError(
                f"{name} has no conversation for {'validation' if held_out else 'training'}: {chats.records[-1] + 1} in all"
                + (f", one in {holdout_every} held out" if holdout_every else "")
                + (f", {self.num_skipped} longer than training.seq_len = {seq_len}" if self.num_skipped else "")
                + ("; reduce data.holdout_every, or set validation.interval = 0" if held_out else "")
            )

    @property
    def fingerprint(self) -> str:
        return self.chats.fingerprint

    @property
    def contents(self) -> str:
        return describe_packed(
            self.num_chats, "conversation", "the assistant", self.num_tokens, self.num_labels, self.num_sequences, self.seq_len,
            documents=self.num_documents, truncated=self.num_truncated, too_long=self.num_skipped, bad=self.chats.skipped,
        )  # fmt: skip

    def read(self, indices: Numbers) -> Sequences:
        shape = len(indices), self.seq_len + 1
        tokens = np.full(shape, self.padding, np.int64)
        loss_mask, document_ids = np.zeros(shape, bool), np.empty(shape, np.int64)
        for row, index in enumerate(indices.tolist()):
            offset = 0
            document_ids[row] = len(self.bins[index])  # of the padding
            for document, chat in enumerate(self.bins[index].tolist()):
                source = slice(self.starts[chat], self.starts[chat] + self.kept[chat])
                target = slice(offset, offset + self.kept[chat])
                tokens[row, target], loss_mask[row, target] = self.chats.tokens[source], self.chats.labels[source]
                document_ids[row, target] = document
                offset = target.stop
        return Sequences(tokens, loss_mask, document_ids)


def describe_packed(
    count: int, item: str, labels_of: str, num_tokens: int, num_labels: int, num_sequences: int, seq_len: int,
    *, truncated: int, too_long: int, bad: int, documents: int = 0, equal: int = 0,
) -> str:  # fmt: skip
    """Returns what packed sequences contain, for the summary of a run. `documents` is the number of renderings, if they differ."""
    filled = 100 * num_tokens / (num_sequences * (seq_len + 1))
    notes = [
        (truncated, f"truncated to {seq_len + 1} tokens"),
        (too_long, "skipped as too long"),
        (equal, "skipped as equal after truncation"),
        (bad, "skipped as bad"),
    ]
    items, sequences = (
        f"{number:,} {name}{'s' * (number != 1)}" for number, name in ((count, item), (num_sequences, "sequence"))
    )
    as_documents = f" as {documents:,} documents" if documents > count else ""
    return (
        f"{items}{as_documents}, {num_tokens:,} tokens ({num_labels:,} of {labels_of}) in {sequences}, {filled:.0f}% full"
        + "".join(f", {number:,} {note}" for number, note in notes if number)
        + ","
    )
