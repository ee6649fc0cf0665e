"""The documents in files: text, JSON lines and Parquet. No torch.

A text file is a document. A line of a `.jsonl` file (or `.json`, where each line is one object) and a row of a `.parquet` file
is one too.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from titanlike.config import UserError
from titanlike.data.text.files import BLOCK, Decompressed, File, needed, open_file

T = TypeVar("T")

LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
PIECE = 2**20  # characters of a document that are made into tokens at once


@dataclass(frozen=True)
class Fields:
    """Where in a record the text is."""

    text: str = "text"
    prompt: str = ""  # what comes before it and is not learnt, if anything
    key: str = "data.text_field"  # where the user says so


@dataclass(frozen=True)
class Document:
    """One text, or a piece of one."""

    text: str
    prompt: str = ""
    record: int = 0  # which of its file, from 0
    size: int = 0  # bytes in the file
    last: bool = True  # else the next piece goes on with it


class BadRecord(UserError):
    """A record that is not what it should be. The text says which, and where."""


Bad = Callable[[BadRecord], None]


def read_documents(
    file: File,
    fields: Fields,
    *,
    first: int = 0,
    span: tuple[int, int] | None = None,
    bad: Bad | None = None,
) -> Iterator[Document]:
    """The documents of a file, from the `first` record on. Of lines, `span` says which bytes: those that begin in it; of
    Parquet, which row groups. A bad record is raised, or given to `bad` and left out; so are records without text."""
    pieces: list[Document] = []
    for piece in read_pieces(file, fields, first=first, span=span, bad=bad):
        pieces.append(piece)
        if piece.last:
            if len(pieces) > 1:
                text, size = "".join(each.text for each in pieces), sum(each.size for each in pieces)
                piece = replace(pieces[0], text=text, size=size, last=True)
            pieces = []
            if piece.text:
                yield piece


def read_pieces(
    file: File,
    fields: Fields,
    *,
    first: int = 0,
    span: tuple[int, int] | None = None,
    bad: Bad | None = None,
) -> Iterator[Document]:
    """As `read_documents`, but a long document comes in pieces, those of a text file without the whole ever being in memory,
    and records without text come too."""
    readers = {PARQUET: _rows} | dict.fromkeys(LINES, _lines)
    if file.kind not in readers:
        yield from _whole(file, first, bad)
        return
    for document in readers[file.kind](file, fields, first, span, bad or _stop):
        if len(document.text) <= PIECE:
            yield document
            continue
        parts = [document.text[place : place + PIECE] for place in range(0, len(document.text), PIECE)]
        for text, last in pieces_of(parts):
            yield replace(document, text=text, last=last)
            document = replace(document, prompt="", size=0)


def pieces_of(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """A text that comes in parts, in pieces, and whether each is the last. Where the cuts are depends on the text alone."""
    waiting = ""
    for part in parts:
        waiting += part
        while len(waiting) > PIECE:
            cut = _cut(waiting)
            yield waiting[:cut], False
            waiting = waiting[cut:]
    yield waiting, True


def _cut(text: str) -> int:
    """Where to end a piece so that byte-pair tokenizers make the same tokens as of the whole: after the end of a line that
    has no white space around it and no sign after it, as some draw those together; else before a space that stands alone;
    else, as in a text that has neither, anywhere."""
    for sign, shift in (("\n", 1), (" ", 0)):
        place = text.rfind(sign, 1, PIECE)
        while place > 0:
            before, after = text[place - 1], text[place + 1]
            if not before.isspace() and (after.isalnum() or (sign == " " and not after.isspace())):
                return place + shift
            place = text.rfind(sign, 1, place)
    return PIECE


def _stop(problem: BadRecord) -> None:
    raise problem


def _whole(file: File, first: int, bad: Bad | None) -> Iterator[Document]:
    if first:
        return
    try:
        if bad is not None and (file.compressed or not 0 < file.size <= PIECE):
            # Read once more, to leave out all of a file that is bad in the middle.
            for _ in _decode(file):
                pass
        size = file.size
        for text, last in pieces_of(_decode(file)):
            done = size if last else min(size, len(text))
            yield Document(text, size=done, last=last)
            size -= done
    except BadRecord as problem:
        (bad or _stop)(problem)


def _decode(file: File) -> Iterator[str]:
    """The text of a file in blocks of bytes as they come, without the mark that some editors put first."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place, mark = 0, "\ufeff"
    with open_file(file) as stream:
        while True:
            content = _read(file, lambda: stream.read(BLOCK))
            waiting = len(decoder.getstate()[0])  # bytes of a character that began in the block before
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                raise BadRecord(
                    f"{file.name}: byte {place - waiting + error.start} is not UTF-8; convert the file, or leave it out"
                ) from None
            place += len(content)
            if text:
                yield text.removeprefix(mark)
                mark = ""
            if not content:
                return


def _lines(file: File, fields: Fields, first: int, span: tuple[int, int] | None, bad: Bad) -> Iterator[Document]:
    with open_file(file) as stream:
        place = read = 0
        if span is not None and span[0]:
            # Begin after the line that another span has: one that begins at the very start of this span is ours.
            place = _read(file, lambda: stream.seek(span[0] - 1))
            place += len(_read(file, stream.readline))
        for number in range(2**62):
            if span is not None and place >= span[1]:
                return
            line = _read(file, stream.readline, f", after line {number}")
            if not line:
                return
            start, place = place, place + len(line)
            if number < first or not line.strip():
                continue
            try:
                text, prompt = _take(_parse(line), fields)
            except BadRecord as problem:
                bad(BadRecord(f"{_where(file, number, start, span)}: {problem}"))
                continue
            size = len(line)
            if isinstance(stream, Decompressed):
                read, size = stream.compressed.tell(), stream.compressed.tell() - read
            yield Document(text, prompt, number, size)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise BadRecord(f"byte {error.start} of it is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON: {error}") from None


def _rows(file: File, fields: Fields, first: int, span: tuple[int, int] | None, bad: Bad) -> Iterator[Document]:
    columns = [name for name in (fields.text, fields.prompt) if name]
    with open_parquet(file) as table:
        for name in columns:
            if name not in table.schema_arrow.names:
                there = ", ".join(table.schema_arrow.names)
                raise UserError(f"{file.name}: has no column {name!r}, but {there}; set {fields.key}")
        sizes = row_groups(table)
        before, number = sum(sizes[: span[0]] if span else []), 0
        for group in range(*(span or (0, len(sizes)))):
            if number + sizes[group] <= first:
                number += sizes[group]
                continue
            for row in _read_rows(file, table, group, columns, before + number):
                if number >= first:
                    try:
                        if isinstance(row, BadRecord):
                            raise row
                        yield Document(*_take(row, fields), number, file.size // sum(sizes))
                    except BadRecord as problem:
                        bad(BadRecord(f"{file.name}, row {before + number + 1}: {problem}"))
                number += 1


@contextmanager
def open_parquet(file: File) -> Iterator[Any]:
    """A Parquet file as pyarrow has it."""
    pyarrow = needed("pyarrow.parquet", file.name)
    with open_file(file) as stream:
        try:
            found = pyarrow.parquet.ParquetFile(stream)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file.name}: not a whole Parquet file: {error}") from None
        yield found


def row_groups(table: Any) -> list[int]:
    """How many rows each group of a Parquet file has."""
    return [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]


def _read_rows(file: File, table: Any, group: int, columns: list[str], number: int) -> Iterator[Any]:
    """The rows of a group, from row `number` of the file on; instead of one that cannot be text, why."""
    batches = table.iter_batches(256, row_groups=[group], columns=columns)
    while True:
        batch = _read(file, lambda: next(batches, None), f", row {number + 1}")
        if batch is None:
            return
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:  # one by one, to find which
            rows = [_row(batch, place) for place in range(len(batch))]
        yield from rows
        number += len(rows)


def _row(batch: Any, place: int) -> Any:
    try:
        return batch.slice(place, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRecord(f"byte {error.start} of it is not UTF-8")


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
        found.append(_well_formed(record[name]))
    return (found[0], found[1]) if fields.prompt else (found[0], "")


def _well_formed(text: str) -> str:
    """JSON can spell half of a pair of surrogates, which is no character and has no UTF-8."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read(file: File, read: Callable[[], T], where: str = "") -> T:
    """Read from a file, or say what is wrong with it."""
    try:
        return read()
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
