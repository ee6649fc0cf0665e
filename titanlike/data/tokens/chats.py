"""Conversations as tokens; the assistant's tokens are labels. No torch."""

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.config.finetune import ChatData
from titanlike.config.sections import Data
from titanlike.data.documents.conversations import Record, RecordReader, conversation_of, synthetic_conversations
from titanlike.data.documents.data_files import File, hash_of, versions_of
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import BadRecord, read_records
from titanlike.data.tokens.arrays import Flags, Numbers
from titanlike.data.tokens.cache import cached
from titanlike.data.tokens.chat_template import ChatTemplate
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.utils.atomic_write import atomic_writer
from titanlike.utils.system import cache_folder

FORMAT = 2
MAX_WARNINGS = 5  # bad records that are reported individually

Encoded = tuple[npt.NDArray[np.uint32], Flags]
Encode = Callable[[Record], Sequence[Encoded]]  # the sequences of a record; raises `BadRecord`
Fields = tuple[list[str], list[str]]  # those that were read, and those that were not


@dataclass(frozen=True)
class TokenizedChats:
    """The tokens of sequences, one after another. A conversation is one sequence, or several if its template renders an answer
    differently when others follow."""

    tokens: npt.NDArray[np.uint32]
    labels: Flags  # True for the tokens of the assistant
    ends: Numbers  # the offset after each sequence
    records: Numbers  # the record of each sequence: its index among those that are not bad
    skipped: int = 0  # bad records
    first: int = 0  # sequences of other paths that precede these
    fields: Fields = ([], [])

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def fingerprint(self) -> str:
        """Hash of the sequences and their records."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.labels, self.ends, self.records):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def save(self, file: Path) -> None:
        """Writes the arrays atomically."""
        with atomic_writer(file) as stream:
            np.savez(
                stream, tokens=self.tokens, labels=self.labels, ends=self.ends, records=self.records, skipped=self.skipped,
                fields=json.dumps(self.fields),
            )  # fmt: skip

    @classmethod
    def load(cls, file: Path) -> "TokenizedChats | None":
        """Reads what `save` wrote. Returns None if the file does not exist or is damaged."""
        try:
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                tokens, labels, ends, records = (arrays[name] for name in ("tokens", "labels", "ends", "records"))
                found = cls(
                    tokens, labels, ends, records, int(arrays["skipped"]), fields=json.loads(str(arrays["fields"]))
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        return found


def tokenize_files(files: Sequence[File], encode: Encode, *, skip_bad: bool) -> TokenizedChats:
    """Tokenizes the conversations in the records of JSON lines and Parquet files. A bad record is skipped with a warning, or
    raised."""
    problems: list[BadRecord] = []

    def skip(problem: BadRecord) -> None:
        problems.append(problem)
        if len(problems) <= MAX_WARNINGS:
            print(f"warning: skipped {problem}", file=sys.stderr, flush=True)

    on_bad: Callable[[BadRecord], None] | None = skip if skip_bad else None
    return concatenate(chain.from_iterable(read_records(file, encode, bad=on_bad) for file in files), problems)


def concatenate(encoded: Iterable[Sequence[Encoded]], problems: Sequence[BadRecord] = ()) -> TokenizedChats:
    """Returns the sequences of records as one array. Raises `UserError` if there are none, with the first of the bad records."""
    records = list(encoded)
    if not records:
        raise UserError("the data has no conversation" + (f"; the first bad record: {problems[0]}" if problems else ""))
    sequences = [each for record in records for each in record]
    tokens, labels = (np.concatenate(arrays) for arrays in zip(*sequences, strict=True))
    numbers = np.repeat(np.arange(len(records)), [len(record) for record in records])
    return TokenizedChats(tokens, labels, np.cumsum([len(ids) for ids, _ in sequences]), numbers, len(problems))


def open_chats(section: ChatData, path: str, template: ChatTemplate) -> TokenizedChats:
    """Returns the tokens of the conversations at one of the paths of a section. They are tokenized unless the cache has them."""
    if path == "synthetic_chat":
        return concatenate(map(template.encode, synthetic_conversations()))
    return open_dialogs(section, path, template, "chats", lambda *each: template.encode(conversation_of(*each)))


def open_dialogs(
    section: ChatData,
    path: str,
    template: ChatTemplate,
    folder: str,
    encode: Callable[[Record, RecordReader], list[Encoded]],
) -> TokenizedChats:
    """Returns the tokens of conversations or pairs, as `open_records` does, and the fields of their records that were read."""
    reader = RecordReader(section.fields)
    return open_records(
        section, path, [template.identity, section.fields], template.tokenizer, folder, lambda record: encode(record, reader),
        lambda: reader.fields_read(template.reads),
    )  # fmt: skip


def describe_fields(opened: Iterable[TokenizedChats]) -> str:
    """Returns which fields of the records are read and which are not; "" if there are no records."""
    read, others = (dict.fromkeys(name for each in opened for name in each.fields[side]) for side in (0, 1))
    unread = [name for name in others if name not in read]
    listed = [
        f"{', '.join(map(shown, names))} {word}" for names, word in ((read, "read"), (unread, "not read")) if names
    ]
    return f"fields  {'; '.join(listed)}" if listed else ""


def open_records(
    section: Data, path: str, identity: Any, tokenizer: Tokenizer, folder: str, encode: Encode,
    fields: Callable[[], Fields] = lambda: ([], []),
) -> TokenizedChats:  # fmt: skip
    """Returns the tokens of the conversations or pairs in the records of files, from a folder of the cache if it has them. Besides
    the tokenizer, `identity` identifies how a record is encoded. `fields` returns the fields of the records encoded so far."""
    files = list_files(path)
    key = hash_of(
        [FORMAT, versions_of(files), identity, section.bad_records, tokenizer.fingerprint, tokenizer.vocab_size]
    )
    file = cache_folder(section.cache) / folder / f"{key}.npz"

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tokenized = tokenize_files(files, encode, skip_bad=section.bad_records == "skip")
        replace(tokenized, fields=fields()).save(file)

    return cached(file, path, write, lambda: TokenizedChats.load(file))
