"""Reads documents from text, JSON lines and Parquet files. No torch.

A text file is one document. In a `.jsonl` file (or `.json` with one object per line) each line is a document; in a `.parquet` file
each row is one.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from titanlike.config import UserError
from titanlike.data.documents.files import BLOCK, Decompressed, File, import_optional, open_file

T = TypeVar("T")
Span = tuple[int, int]

LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
CHUNK_SIZE = 2**20  # characters of a document that are tokenized at once


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


class BadRecord(UserError):
    """A record that cannot be used. The message names the file and the line or row."""


OnBadRecord = Callable[[BadRecord], None]
Parse = Callable[[Callable[[], Any]], T]  # takes a function that loads a record


def read_documents(
    file: File, fields: Fields, *, first: int = 0, span: Span | None = None, bad: OnBadRecord | None = None
) -> Iterator[Document]:
    """Reads the documents of a file that are not empty, from record `first` of the span on.

    For JSON lines, `span` is a range of byte offsets, and the lines that begin in it are read; for Parquet it is a range of row
    groups. A bad record is passed to `bad` and skipped, or raised by default.
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
    if file.kind not in (PARQUET, *LINES):
        if not first:
            yield from _read_text(file, bad)
        return
    extract = partial(_extract, fields=fields)
    if file.kind == PARQUET:
        columns = {} if fields.whole_record else fields.keys
        records = _read_rows(file, columns, extract, first, span, bad)
    else:
        records = _read_lines(file, extract, first, span, bad)
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
    """Reads the objects of a JSON lines or Parquet file, each converted by a function that raises `BadRecord` for a bad one."""
    if file.kind not in (PARQUET, *LINES):
        raise UserError(f"{file.name}: not a file of records; its name must end with {', '.join((*LINES, PARQUET))}")

    def parse(load: Callable[[], Any]) -> T:
        return convert(_load(load))

    bad = bad or _raise
    parquet = file.kind == PARQUET
    records = _read_rows(file, {}, parse, 0, None, bad) if parquet else _read_lines(file, parse, 0, None, bad)
    yield from (record for _, _, record in records)


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
        if bad is not _raise and (file.compressed or not 0 < file.size <= CHUNK_SIZE):
            for _ in _decode(file):  # find invalid UTF-8 first, to skip the complete file
                pass
        unread = file.size
        for text, last in split_chunks(_decode(file)):
            size = unread if last else min(unread, len(text))
            yield Document(text, size=size, last=last)
            unread -= size
    except BadRecord as problem:
        bad(problem)


def _decode(file: File) -> Iterator[str]:
    """Decodes a file block by block, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, byte_order_mark = 0, "\ufeff"
    with open_file(file) as stream:
        content = b"-"
        while content:
            content = _checked(file, lambda: stream.read(BLOCK))
            incomplete = len(decoder.getstate()[0])  # bytes of a character that began in the previous block
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                raise BadRecord(
                    f"{file.name}: byte {offset - incomplete + error.start} is not UTF-8; convert the file, or leave it out"
                ) from None
            offset += len(content)
            if text:
                yield text.removeprefix(byte_order_mark)
                byte_order_mark = ""


def _read_lines(
    file: File, parse: Parse[T], first: int, span: Span | None, bad: OnBadRecord
) -> Iterator[tuple[int, int, T]]:
    """Yields the number, the bytes in the file and the parsed content of each line that is not empty."""
    begin, end = span or (0, None)
    with open_file(file) as stream:
        offset = compressed_offset = number = 0
        if begin:
            # The previous span reads the line that contains byte begin - 1. A line that begins at `begin` is read here.
            offset = _checked(file, lambda: stream.seek(begin - 1))
            offset += len(_checked(file, stream.readline))
        while (end is None or offset < end) and (line := _checked(file, stream.readline, f", after line {number}")):
            start, offset = offset, offset + len(line)
            number += 1
            if number <= first or not line.strip():
                continue
            size = len(line)
            try:
                record = parse(partial(json.loads, line))
            except BadRecord as problem:
                before = count_lines(file, start) if begin else number - 1
                bad(BadRecord(f"{file.name}, line {before + 1}: {problem}"))
                continue
            if isinstance(stream, Decompressed):
                before, compressed_offset = compressed_offset, stream.compressed.tell()
                size = compressed_offset - before
            yield number - 1, size, record


def count_lines(file: File, stop: int) -> int:
    """Counts the lines before a byte offset."""
    with open_file(file) as stream:
        return sum(stream.read(min(BLOCK, stop - start)).count(b"\n") for start in range(0, stop, BLOCK))


def _read_rows(
    file: File, columns: dict[str, str], parse: Parse[T], first: int, span: Span | None, bad: OnBadRecord
) -> Iterator[tuple[int, int, T]]:
    """Yields the number, the approximate bytes and the parsed content of each row. `columns` has the option that sets each name; if
    it is empty, all columns are read."""
    with open_parquet(file) as table:
        for name, key in columns.items():
            if name not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names)
                raise UserError(f"{file.name}: no column {name!r}; its columns are {names}; set {key}")
        sizes = row_groups(table)
        begin, end = span or (0, len(sizes))
        skipped, number = sum(sizes[:begin]), 0  # rows before the span, and rows of it
        row_bytes = file.size // max(sum(sizes), 1)
        for group in range(begin, end):
            if number + sizes[group] <= first:
                number += sizes[group]
                continue
            batches = table.iter_batches(256, row_groups=[group], columns=list(columns) or None)
            read = partial(next, batches, None)
            while (batch := _checked(file, read, f", row {skipped + number + 1}")) is not None:
                for row in range(len(batch)):
                    number += 1
                    if number <= first:
                        continue
                    try:
                        record = parse(partial(_to_python, batch, row))
                    except BadRecord as problem:
                        bad(BadRecord(f"{file.name}, row {skipped + number}: {problem}"))
                    else:
                        yield number - 1, row_bytes, record


@contextmanager
def open_parquet(file: File) -> Iterator[Any]:
    """Opens a file as a `pyarrow.parquet.ParquetFile`."""
    pyarrow = import_optional("pyarrow.parquet", file.name)
    with open_file(file) as stream:
        try:
            table = pyarrow.parquet.ParquetFile(stream)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file.name}: not a complete Parquet file: {error}") from None
        yield table


def row_groups(table: Any) -> list[int]:
    """Returns the number of rows of each row group of a Parquet file."""
    return [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]


def _to_python(batch: Any, row: int) -> dict[str, Any]:
    return {name: batch[name][row].as_py() for name in batch.schema.names}


def _extract(load: Callable[[], Any], fields: Fields) -> tuple[str, str, dict[str, Any] | None]:
    """Returns the text and the prompt of a record, and the record if `fields` asks for it."""
    record = _load(load, f" with a field {fields.text!r}")
    texts = {name: _text_of(record, name, key) for name, key in fields.keys.items()}
    return texts[fields.text], texts.get(fields.prompt, ""), record if fields.whole_record else None


def _load(load: Callable[[], Any], expected: str = "") -> dict[str, Any]:
    try:
        record = load()
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


def _checked(file: File, read: Callable[[], T], position: str = "") -> T:
    """Calls `read`. Converts its errors into a `UserError` with the file and position."""
    try:
        return read()
    except UserError:
        raise
    except EOFError:
        raise UserError(f"{file.name}{position}: the file is truncated; copy it again") from None
    except Exception as error:  # noqa: BLE001  each compression format and file system has its own errors
        raise UserError(f"{file.name}{position}: cannot be read: {type(error).__name__}: {error}") from None
