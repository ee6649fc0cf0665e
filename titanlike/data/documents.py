"""The documents in files: text, JSON lines and Parquet. No torch.

A text file is a document. A line of a `.jsonl` file (or `.json`, where each line is one object) and a row of a `.parquet` file
is one too.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from titanlike.config import UserError
from titanlike.data.files import File, needed, open_file

LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"


@dataclass(frozen=True)
class Fields:
    """Where in a record the text is."""

    text: str = "text"
    prompt: str = ""  # what comes before it and is not learnt, if anything
    key: str = "data.text_field"  # where the user says so


@dataclass(frozen=True)
class Document:
    """One text."""

    text: str
    prompt: str = ""
    record: int = 0  # which of its file, from 0
    size: int = 0  # bytes in the file, before decompression about


class BadRecord(UserError):
    """A record that is not what it should be. The text says which, and where."""


def read_documents(
    file: File,
    fields: Fields,
    *,
    first: int = 0,
    span: tuple[int, int] | None = None,
    bad: Callable[[BadRecord], None] | None = None,
) -> Iterator[Document]:
    """The documents of a file, from the `first` record on. Of lines, `span` says which bytes: those that begin in it; of
    Parquet, which row groups. A bad record is raised, or given to `bad` and left out; so are records without text."""
    readers = {PARQUET: _rows} | dict.fromkeys(LINES, _lines)
    read = readers.get(file.kind, _whole)
    for document in read(file, fields, first, span, bad or _stop):
        if document.text:
            yield document


def _stop(problem: BadRecord) -> None:
    raise problem


def _whole(
    file: File, fields: Fields, first: int, span: tuple[int, int] | None, bad: Callable[[BadRecord], None]
) -> Iterator[Document]:
    if first:
        return
    content = _read(file, lambda stream: stream.read())
    try:
        yield Document(content.decode("utf-8-sig"), size=file.size)
    except UnicodeDecodeError as error:
        bad(BadRecord(f"{file.name}: byte {error.start} is not UTF-8; convert the file, or leave it out"))


def _lines(
    file: File, fields: Fields, first: int, span: tuple[int, int] | None, bad: Callable[[BadRecord], None]
) -> Iterator[Document]:
    with open_file(file) as stream:
        place = 0
        if span is not None and span[0]:
            # Begin after the line that another span has: one that begins at the very start of this span is ours.
            stream.seek(span[0] - 1)
            place = span[0] - 1 + len(stream.readline())
        for number in range(2**62):
            if span is not None and place >= span[1]:
                return
            line = _line(file, stream, number)
            if not line:
                return
            start, place = place, place + len(line)
            if number < first or not line.strip():
                continue
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                bad(BadRecord(f"{_where(file, number, start, span)}: byte {error.start} of it is not UTF-8"))
                continue
            except ValueError as error:
                bad(BadRecord(f"{_where(file, number, start, span)}: not JSON: {error}"))
                continue
            try:
                text, prompt = _take(record, fields)
            except BadRecord as problem:
                bad(BadRecord(f"{_where(file, number, start, span)}: {problem}"))
                continue
            yield Document(text, prompt, number, len(line))


def _rows(
    file: File, fields: Fields, first: int, span: tuple[int, int] | None, bad: Callable[[BadRecord], None]
) -> Iterator[Document]:
    pyarrow = needed("pyarrow.parquet", file.name)
    columns = [name for name in (fields.text, fields.prompt) if name]
    with open_file(file) as stream:
        try:
            table = pyarrow.parquet.ParquetFile(stream)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{file.name}: not a whole Parquet file: {error}") from None
        there = table.schema_arrow.names
        for name in columns:
            if name not in there:
                raise UserError(f"{file.name}: has no column {name!r}, but {', '.join(there)}; set {fields.key}")
        number = 0
        for group in range(*(span or (0, table.num_row_groups))):
            rows = table.metadata.row_group(group).num_rows
            if number + rows <= first:
                number += rows
                continue
            size = table.metadata.row_group(group).total_byte_size // max(rows, 1)
            try:
                for batch in table.iter_batches(256, row_groups=[group], columns=columns):
                    for row in batch.to_pylist():
                        if number >= first:
                            try:
                                yield Document(*_take(row, fields), number, size)
                            except BadRecord as problem:
                                bad(BadRecord(f"{file.name}, row {number + 1}: {problem}"))
                        number += 1
            except (pyarrow.ArrowException, OSError) as error:
                raise UserError(f"{file.name}, row {number + 1}: cannot be read: {error}") from None


def _take(record: Any, fields: Fields) -> tuple[str, str]:
    """The text and the prompt of a record."""
    if not isinstance(record, dict):
        raise BadRecord(f"a {type(record).__name__} and not an object with a field {fields.text!r}")
    found = []
    for name in (fields.text, fields.prompt) if fields.prompt else (fields.text,):
        if name not in record:
            raise BadRecord(f"has no field {name!r}, but {', '.join(map(str, record)) or 'none'}; set {fields.key}")
        if not isinstance(record[name], str):
            raise BadRecord(f"its field {name!r} is no text: {json.dumps(record[name], default=str)[:40]}")
        found.append(record[name])
    return (found[0], found[1]) if fields.prompt else (found[0], "")


def _line(file: File, stream: BinaryIO, number: int) -> bytes:
    return _read(file, lambda _: stream.readline(), f", after line {number}", stream)


def _read(file: File, read: Callable[[BinaryIO], bytes], where: str = "", stream: BinaryIO | None = None) -> bytes:
    """Read from a file, or say what is wrong with it."""
    try:
        if stream is not None:
            return read(stream)
        with open_file(file) as opened:
            return read(opened)
    except UserError:
        raise
    except EOFError:
        raise UserError(f"{file.name}{where}: is cut off; copy it again") from None
    except Exception as error:  # noqa: BLE001  each compression and each file system has errors of its own
        raise UserError(f"{file.name}{where}: cannot be read: {type(error).__name__}: {error}") from None


def _where(file: File, number: int, start: int, span: tuple[int, int] | None) -> str:
    """A line by its number. In a part of a file, those before it are counted now: it was not worth it until now."""
    if span is not None and span[0]:
        with open_file(file) as stream:
            number = sum(stream.read(min(2**20, start - place)).count(b"\n") for place in range(0, start, 2**20))
    return f"{file.name}, line {number + 1}"
