"""Conversations as tokens, of which those of the assistant are labels. No torch."""

import hashlib
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.config.finetune import ChatData
from titanlike.config.sections import Data
from titanlike.data.documents.conversations import conversation_of, synthetic_conversations
from titanlike.data.documents.files import File, hash_of, list_files, versions_of
from titanlike.data.documents.readers import BadRecord, read_records
from titanlike.data.tokens.arrays import Flags, Numbers
from titanlike.data.tokens.cache import cached
from titanlike.data.tokens.chat_template import ChatTemplate
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.utils.files import atomic_writer
from titanlike.utils.system import cache_folder

FORMAT = 1
MAX_WARNINGS = 5  # bad records that are reported individually

Encoded = tuple[npt.NDArray[np.uint32], Flags]
Encode = Callable[[dict[str, Any]], Sequence[Encoded]]  # the conversations of a record; raises `BadRecord`


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


def tokenize_files(files: Sequence[File], encode: Encode, *, skip_bad: bool) -> TokenizedChats:
    """Tokenizes the conversations in the records of JSON lines and Parquet files. A bad record is skipped with a warning, or
    raised."""
    problems: list[BadRecord] = []

    def skip(problem: BadRecord) -> None:
        problems.append(problem)
        if len(problems) <= MAX_WARNINGS:
            print(f"warning: skipped {problem}", file=sys.stderr, flush=True)

    def read() -> Iterator[Encoded]:
        for file in files:
            for conversations in read_records(file, encode, bad=on_bad):
                yield from conversations

    on_bad: Callable[[BadRecord], None] | None = skip if skip_bad else None
    return concatenate(read(), problems)


def concatenate(encoded: Iterable[Encoded], problems: Sequence[BadRecord] = ()) -> TokenizedChats:
    """Returns conversations as one array. Raises `UserError` if there are none, with the first of the bad records."""
    pairs = list(encoded)
    if not pairs:
        raise UserError("the data has no conversation" + (f"; the first bad record: {problems[0]}" if problems else ""))
    tokens, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return TokenizedChats(tokens, labels, np.cumsum([len(ids) for ids, _ in pairs]), len(problems))


def open_chats(section: ChatData, path: str, template: ChatTemplate) -> TokenizedChats:
    """Returns the tokens of the conversations at one of the paths of a section. They are tokenized unless the cache has them."""
    if path == "synthetic_chat":
        return concatenate(map(template.encode, synthetic_conversations()))
    encode: Encode = lambda record: [template.encode(conversation_of(record))]  # noqa: E731
    return open_records(section, path, template.identity, template.tokenizer, "chats", encode)


def open_records(
    section: Data, path: str, identity: Any, tokenizer: Tokenizer, folder: str, encode: Encode
) -> TokenizedChats:
    """Returns the tokens of the conversations or pairs in the records of files, from a folder of the cache if it has them. Besides
    the tokenizer, `identity` identifies how a record is encoded."""
    files = list_files(path)
    key = hash_of(
        [FORMAT, versions_of(files), identity, section.bad_records, tokenizer.fingerprint, tokenizer.vocab_size]
    )
    file = cache_folder(section.cache) / folder / f"{key}.npz"

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tokenize_files(files, encode, skip_bad=section.bad_records == "skip").save(file)

    return cached(file, path, write, lambda: TokenizedChats.load(file))
