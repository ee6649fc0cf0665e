"""Conversations for fine-tuning: tokenized once, then packed into sequences that keep them whole. No torch."""

import bisect
import hashlib
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.data.packed_dataset import Flags, Sequences
from titanlike.data.shuffle import Numbers
from titanlike.data.text.chat_template import ChatTemplate
from titanlike.data.text.conversations import Conversation, conversation_of
from titanlike.data.text.documents import BadRecord, read_records
from titanlike.data.text.files import File
from titanlike.data.text.tokenizer import Tokenizer
from titanlike.utils.atomic_io import atomic_writer

FORMAT = 1
MAX_WARNINGS = 5  # bad records that are reported individually

Encoded = tuple[npt.NDArray[np.uint32], Flags]


@dataclass(frozen=True)
class TokenizedChats:
    """The tokens of conversations, one after another."""

    tokens: npt.NDArray[np.uint32]
    labels: Flags  # True for the tokens of the assistant
    ends: Numbers  # the offset after each conversation
    skipped: int = 0  # bad records

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def fingerprint(self) -> str:
        """Hash of the conversations."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.labels, self.ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def save(self, file: Path) -> None:
        """Writes the arrays atomically."""
        with atomic_writer(file) as stream:
            np.savez(stream, tokens=self.tokens, labels=self.labels, ends=self.ends, skipped=self.skipped)

    @classmethod
    def load(cls, file: Path) -> "TokenizedChats | None":
        """Reads what `save` wrote. Returns None if the file does not exist or is damaged."""
        try:
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                found = cls(arrays["tokens"], arrays["labels"], arrays["ends"], int(arrays["skipped"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        return found


def tokenize_files(files: Sequence[File], template: ChatTemplate, *, skip_bad: bool) -> TokenizedChats:
    """Tokenizes the conversations in JSON lines and Parquet files. A bad record is skipped with a warning, or raised."""
    problems: list[BadRecord] = []

    def skip(problem: BadRecord) -> None:
        problems.append(problem)
        if len(problems) <= MAX_WARNINGS:
            print(f"warning: skipped {problem}", file=sys.stderr, flush=True)

    def read() -> Iterator[Encoded]:
        for file in files:
            yield from read_records(file, lambda record: template.encode(conversation_of(record)), bad=on_bad)

    on_bad: Callable[[BadRecord], None] | None = skip if skip_bad else None
    return _concatenate(read(), problems)


def tokenize(conversations: Iterable[Conversation], template: ChatTemplate) -> TokenizedChats:
    """Tokenizes conversations in memory."""
    return _concatenate(map(template.encode, conversations), [])


def _concatenate(encoded: Iterable[Encoded], problems: Sequence[BadRecord]) -> TokenizedChats:
    pairs = list(encoded)
    if not pairs:
        raise UserError("the data has no conversation" + (f"; the first bad record: {problems[0]}" if problems else ""))
    tokens, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return TokenizedChats(tokens, labels, np.cumsum([len(ids) for ids, _ in pairs]), len(problems))


class PackedChats:
    """Sequences of whole conversations, packed by best fit and padded. Every `holdout_every`-th conversation is held out.

    Each conversation is a document of its sequence: attention does not leave it, and its positions count from 0. Only tokens of
    the assistant are labels.
    """

    def __init__(
        self,
        chats: TokenizedChats,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        too_long: Literal["truncate", "skip"] = "truncate",
        held_out: bool = False,
        holdout_every: int = 0,
        name: str = "the data",
    ) -> None:
        self.chats = chats
        self.name = name
        self.seq_len = seq_len
        self.padding = tokenizer.separator.token
        numbers = np.arange(len(chats))
        if holdout_every:
            numbers = numbers[(numbers % holdout_every == holdout_every - 1) == held_out]
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
        self.num_chats = len(numbers)
        self.num_tokens = int(kept[numbers].sum())
        self.num_labels = int((num_labels[starts + kept] - num_labels[starts])[numbers].sum())
        self.starts, self.kept = starts, kept
        self.bins = [numbers[group] for group in pack(kept[numbers], capacity)]
        self.num_sequences = len(self.bins)
        if not self.bins:
            raise UserError(
                f"{name} has no conversation for {'validation' if held_out else 'training'}: {len(chats)} in all"
                + (f", one in {holdout_every} held out" if holdout_every else "")
                + (f", {self.num_skipped} longer than training.seq_len = {seq_len}" if self.num_skipped else "")
                + ("; reduce data.holdout_every, or set validation.interval = 0" if held_out else "")
            )

    @property
    def fingerprint(self) -> str:
        return self.chats.fingerprint

    @property
    def contents(self) -> str:
        filled = 100 * self.num_tokens / (self.num_sequences * (self.seq_len + 1))
        notes = [
            (self.num_truncated, f"truncated to {self.seq_len + 1} tokens"),
            (self.num_skipped, "skipped as too long"),
            (self.chats.skipped, "skipped as bad"),
        ]
        chats, sequences = (
            f"{count:,} {name}{'s' * (count != 1)}"
            for count, name in ((self.num_chats, "conversation"), (self.num_sequences, "sequence"))
        )
        return (
            f"{chats}, {self.num_tokens:,} tokens ({self.num_labels:,} of the assistant) in {sequences}, {filled:.0f}% full"
            + "".join(f", {count:,} {note}" for count, note in notes if count)
            + ","
        )

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


def pack(lengths: Numbers, capacity: int) -> list[list[int]]:
    """Distributes items over as few bins as best fit, from the longest to the shortest, needs. Returns the items of each bin."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and number of each bin that is not full, by room
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect.bisect_left(free, (length, 0))
        if at < len(free):
            room, number = free.pop(at)
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        if room > length:
            bisect.insort(free, (room - length, number))
    return bins
