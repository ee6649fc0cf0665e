"""Reads documents from text files, and from the records of JSON, CSV, Arrow and Parquet files. No torch.

A text file is one document. In a file of records (`records.py`) each record is one.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from titanlike.config import UserError
from titanlike.data.documents.data_files import File
from titanlike.data.documents.records import KINDS, Span, decode, parse_records
from titanlike.data.documents.records import BadRecord as BadRecord
from titanlike.data.documents.records import OnBadRecord as OnBadRecord

T = TypeVar("T")

CHUNK_SIZE = 2**20  # characters of a document that are tokenized at once
NOT_TEXT = {
    **dict.fromkeys((".bin", ".idx"), "tokens or other binary data, of which data.source = 'shards' reads token files"),
    **dict.fromkeys((".doc", ".docx", ".odt", ".pdf", ".ppt", ".pptx"), "a document of an office program"),
    **dict.fromkeys((".ods", ".xls", ".xlsx"), "a spreadsheet"),
    **dict.fromkeys(
        (".ckpt", ".gguf", ".h5", ".npy", ".npz", ".pkl", ".pt", ".pth", ".safetensors"), "arrays or objects"
    ),
    **dict.fromkeys((".7z", ".bz2", ".rar", ".tar", ".tgz", ".xz", ".zip"), "an archive"),
}


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a record."""

    text: str = "text"
    prompt: str = ""  # precedes the text and is excluded from the loss; empty: none
    key: str = "data.text_field"  # the option that sets `text`, for error messages
    whole_record: bool = False  # documents have all fields of their record

    @property
    def keys(self) -> dict[str, str]:
        """Returns the option that sets each field."""
        prompt = {self.prompt: self.key.replace("text", "prompt")} if self.prompt else {}
        return prompt | {self.text: self.key}


@dataclass(frozen=True)
class Document:
    """A document, or a chunk of one."""

    text: str
    prompt: str = ""
    record: int = 0  # index within the span of the file that is read
    size: int = 0  # bytes in the file
    last: bool = True  # False: another chunk of this document follows
    fields: dict[str, Any] | None = None  # of the record, with `whole_record`


def read_documents(
    file: File, fields: Fields, *, first: int = 0, span: Span | None = None, bad: OnBadRecord | None = None
) -> Iterator[Document]:
    """Reads the documents of a file that are not empty, from record `first` of the span on.

    For JSON lines, `span` is a range of byte offsets, and the lines that begin in it are read; for Parquet it is a range of row
    groups; others have none. A bad record is passed to `bad` and skipped, or raised by default.
    """
    chunks: list[Document] = []
    for chunk in read_chunks(file, fields, first=first, span=span, bad=bad):
        chunks.append(chunk)
        if chunk.last:
            text, size = "".join(each.text for each in chunks), sum(each.size for each in chunks)
            if text:
                yield replace(chunks[0], text=text, size=size, last=True)
            chunks = []


def read_chunks(
    file: File, fields: Fields, *, first: int = 0, span: Span | None = None, bad: OnBadRecord | None = None
) -> Iterator[Document]:
    """Reads documents like `read_documents`, long ones in chunks, and empty ones too. Text files of any size fit in memory."""
    bad = bad or _raise
    if file.kind not in KINDS:
        if not first:
            yield from _read_text(file, bad)
        return
    columns = {} if fields.whole_record else fields.keys
    records = parse_records(file, columns, partial(_extract, fields=fields), first, span, bad)
    for number, size, (text, prompt, record) in records:
        yield from chunks_of(Document(text, prompt, number, size, fields=record))


def chunks_of(document: Document) -> Iterator[Document]:
    """Splits a complete document into chunks."""
    if len(document.text) <= CHUNK_SIZE:
        yield document
        return
    starts = range(0, len(document.text), CHUNK_SIZE)  # parts, because split_chunks copies what follows a chunk
    for text, last in split_chunks([document.text[start : start + CHUNK_SIZE] for start in starts]):
        yield replace(document, text=text, last=last)
        document = replace(document, prompt="", size=0, fields=None)


def read_records(file: File, convert: Callable[[dict[str, Any]], T], *, bad: OnBadRecord | None = None) -> Iterator[T]:
    """Reads the records of a file, each converted by a function that raises `BadRecord` for a bad one."""
    if file.kind not in KINDS:
        raise UserError(f"{file.name}: not a file of records; its name must end with {', '.join(KINDS)}")

    def parse(load: Callable[[], Any]) -> T:
        return convert(_load(load))

    yield from (record for _, _, record in parse_records(file, {}, parse, 0, None, bad or _raise))


def split_chunks(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Splits a text, given in parts, into chunks, and says which is the last. The boundaries depend on the text only."""
    rest = ""
    for part in parts:
        rest += part
        while len(rest) > CHUNK_SIZE:
            end = _chunk_end(rest)
            yield rest[:end], False
            rest = rest[end:]
    yield rest, True


def _chunk_end(text: str) -> int:
    """Finds a chunk boundary at which byte-pair tokenizers produce the same tokens as without it.

    That is after a line break between a character that is not white space and a letter or digit (some tokenizers merge
    punctuation with a line break), or else before a single space. A text with neither is split anywhere.
    """
    for separator, shift in (("\n", 1), (" ", 0)):
        index = text.rfind(separator, 1, CHUNK_SIZE)
        while index > 0:
            before, after = text[index - 1], text[index + 1]
            if not before.isspace() and (after.isalnum() or (separator == " " and not after.isspace())):
                return index + shift
            index = text.rfind(separator, 1, index)
    return CHUNK_SIZE


def _raise(problem: BadRecord) -> None:
    raise problem


def _read_text(file: File, bad: OnBadRecord) -> Iterator[Document]:
    try:
        if what := NOT_TEXT.get(file.kind):
            raise BadRecord(f"{file.name} is not text: its name stands for {what}; convert the file, or leave it out")
        if bad is not _raise and (file.compressed or not 0 < file.size <= CHUNK_SIZE):
            for _ in decode(file):  # find invalid UTF-8 first, to skip the complete file
                pass
        unread = file.size
        for text, last in split_chunks(decode(file)):
            size = unread if last else min(unread, len(text))
            yield Document(text, size=size, last=last)
            unread -= size
    except BadRecord as problem:
        bad(problem)


def _extract(load: Callable[[], Any], fields: Fields) -> tuple[str, str, dict[str, Any] | None]:
    """Returns the text and the prompt of a record, and the record if `fields` asks for it."""
    record = _load(load, f" with a field {fields.text!r}")
    texts = {name: _text_of(record, name, key) for name, key in fields.keys.items()}
    return texts[fields.text], texts.get(fields.prompt, ""), record if fields.whole_record else None


def _load(load: Callable[[], Any], expected: str = "") -> dict[str, Any]:
    try:
        record = load()
    except BadRecord:
        raise
    except UnicodeDecodeError as error:
        raise BadRecord(f"byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRecord(f"a {type(record).__name__}, not an object{expected}")
    return record


def _text_of(record: dict[str, Any], name: str, key: str) -> str:
    if name not in record:
        raise BadRecord(f"no field {name!r}; its fields are {', '.join(map(str, record)) or 'none'}; set {key}")
    if not isinstance(record[name], str):
        raise BadRecord(f"the field {name!r} is not text: {json.dumps(record[name], default=str)[:40]}")
    return replace_surrogates(record[name])


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates, which JSON permits and UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
