"""Reads the records of JSON lines, JSON arrays, CSV, Arrow and Parquet files. No torch.

A record is a line of `.jsonl` (or of `.json`), an element of the array in a `.json` file, or a row of a table.
"""

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from titanlike.config import UserError
from titanlike.data.documents.data_files import File, import_optional
from titanlike.data.documents.opening import BLOCK, Decompressed, open_file

T = TypeVar("T")
Span = tuple[int, int]

LINES = (".jsonl", ".json", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
ARROW = (".arrow", ".feather")
PARQUET = ".parquet"
KINDS = (*LINES, *DELIMITERS, *ARROW, PARQUET)  # suffixes of files of records
NOT_CLOSED = "unexpected end of data"  # of csv.Error
MAX_FIELD = 2**27  # characters of a CSV field: bounds the memory that a quotation mark without its partner takes


class BadRecord(UserError):
    """A record that cannot be used. The message names the file and the line or row."""


OnBadRecord = Callable[[BadRecord], None]
Parse = Callable[[Callable[[], Any]], T]  # takes a function that loads a record
Records = Iterator[tuple[int, int, T]]  # number, approximate bytes in the file, and parsed content of each record


def parse_records(
    file: File, columns: dict[str, str], parse: Parse[T], first: int, span: Span | None, bad: OnBadRecord
) -> Records[T]:
    """Reads the records of a file from number `first` of the span on. Of a table, reads the columns of which `columns` has the
    option that sets each name, and all columns if it is empty."""
    if file.kind in DELIMITERS:
        return _read_delimited(file, columns, parse, first, bad)
    if file.kind == PARQUET or file.kind in ARROW:
        return _read_rows(file, columns, parse, first, span, bad)
    return _read_array(file, parse, first, bad) if is_array(file) else _read_lines(file, parse, first, span, bad)


def is_array(file: File) -> bool:
    """Whether a file has one JSON array, and not JSON lines."""
    if file.kind != ".json":
        return False
    with open_file(file) as stream:
        start: bytes = checked(file, lambda: stream.read(4096))
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def decode(file: File) -> Iterator[str]:
    """Decodes a file block by block, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, byte_order_mark = 0, "\ufeff"
    with open_file(file) as stream:
        content = b"-"
        while content:
            content = checked(file, lambda: stream.read(BLOCK))
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


def _read_lines(file: File, parse: Parse[T], first: int, span: Span | None, bad: OnBadRecord) -> Records[T]:
    """Reads the lines that are not empty. Yields the exact number of bytes of each."""
    begin, end = span or (0, None)
    with open_file(file) as stream:
        offset = compressed_offset = number = 0
        if begin:
            # The previous span reads the line that contains byte begin - 1. A line that begins at `begin` is read here.
            offset = checked(file, lambda: stream.seek(begin - 1))
            offset += len(checked(file, stream.readline))
        while (end is None or offset < end) and (line := checked(file, stream.readline, f", after line {number}")):
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


def _read_array(file: File, parse: Parse[T], first: int, bad: OnBadRecord) -> Records[T]:
    """Reads the elements of a JSON array, which is in memory as a whole. One that is not JSON is never skipped."""
    try:
        values = json.loads("".join(decode(file)))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.name}: not JSON: {error}; correct the file, or copy it again") from None
    for number, value in enumerate(values[first:], first):
        try:
            record = parse(lambda value=value: value)  # type: ignore[misc]
        except BadRecord as problem:
            bad(BadRecord(f"{file.name}, record {number + 1}: {problem}"))
        else:
            yield number, file.size // len(values), record


def _read_delimited(file: File, columns: dict[str, str], parse: Parse[T], first: int, bad: OnBadRecord) -> Records[T]:
    """Reads the rows of a CSV or TSV file below its header. All values are text. A quotation mark that is not closed is never
    skipped."""
    csv.field_size_limit(MAX_FIELD)
    with open_file(file) as stream:
        offset = 0

        def lines() -> Iterator[str]:
            nonlocal offset
            while line := checked(file, stream.readline, f", after line {reader.line_num}"):
                text = line if offset else line.removeprefix(codecs.BOM_UTF8)
                offset += len(line)
                yield text.decode(errors="surrogateescape")  # a row that is not UTF-8 is one bad record

        def position() -> int:
            return stream.compressed.tell() if isinstance(stream, Decompressed) else offset

        reader = csv.reader(lines(), delimiter=DELIMITERS[file.kind], strict=True)
        try:
            names = next(reader, [])
        except csv.Error as error:
            raise UserError(f"{file.name}, line 1: not a CSV header: {error}; correct the file") from None
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{file.name}: its header has two columns {twice[0]!r}; rename one")
        _check_columns(file, names if names else list(columns), columns)
        number = 0
        while True:
            begin, line = position(), reader.line_num + 1
            try:
                row = next(reader, None)
                if row is None:
                    return
                if not row:  # an empty line
                    continue
                number += 1
                if number <= first:
                    continue
                record = parse(partial(_named, names, row))
            except (csv.Error, BadRecord) as error:
                if str(error) == NOT_CLOSED:  # the rows that follow are in its field
                    raise UserError(
                        f"{file.name}, line {line}: a quotation mark is not closed; correct the file"
                    ) from None
                number += isinstance(error, csv.Error)
                bad(BadRecord(f"{file.name}, row {number} (line {line}): {error}"))
                continue
            yield number - 1, position() - begin, record


def _named(names: list[str], row: list[str]) -> dict[str, str]:
    """Returns the values of a row by the names of their columns."""
    if len(row) != len(names):
        raise BadRecord(f"it has {len(row)} values, but the header has {len(names)} columns")
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        raise BadRecord("it is not UTF-8") from None
    return dict(zip(names, row, strict=True))


def _read_rows(
    file: File, columns: dict[str, str], parse: Parse[T], first: int, span: Span | None, bad: OnBadRecord
) -> Records[T]:
    """Reads the rows of a Parquet or Arrow file."""
    is_parquet = file.kind == PARQUET
    for batch in _parquet_batches(file, columns, first, span) if is_parquet else _arrow_batches(file, columns, first):
        size = batch.row_bytes
        for row in range(max(first - batch.number, 0), len(batch.rows)):
            number = batch.number + row
            try:
                record = parse(partial(_to_python, batch.rows, row))
            except BadRecord as problem:
                bad(BadRecord(f"{file.name}, row {batch.skipped + number + 1}: {problem}"))
            else:
                yield number, size, record


class _Batch(NamedTuple):
    """Rows of a table."""

    rows: Any  # pyarrow.RecordBatch
    number: int  # of the first, in the span
    skipped: int  # rows before the span
    row_bytes: int  # approximate bytes of a row in the file


def _parquet_batches(file: File, columns: dict[str, str], first: int, span: Span | None) -> Iterator[_Batch]:
    with open_parquet(file) as table:
        _check_columns(file, table.schema_arrow.names, columns)
        sizes = row_groups(table)
        begin, end = span or (0, len(sizes))
        skipped, number = sum(sizes[:begin]), 0
        row_bytes = file.size // max(sum(sizes), 1)
        for group in range(begin, end):
            if number + sizes[group] <= first:
                number += sizes[group]
                continue
            batches = table.iter_batches(256, row_groups=[group], columns=list(columns) or None)
            read = partial(next, batches, None)
            while (rows := checked(file, read, f", row {skipped + number + 1}")) is not None:
                yield _Batch(rows, number, skipped, row_bytes)
                number += len(rows)


def _arrow_batches(file: File, columns: dict[str, str], first: int) -> Iterator[_Batch]:
    """Reads an Arrow stream, as `datasets.save_to_disk` writes it, or a file (Feather)."""
    pyarrow = import_optional("pyarrow.ipc", file.name)
    with open_file(file) as stream:
        try:
            if stream.peek(6)[:6] == b"ARROW1":
                table = pyarrow.ipc.open_file(stream)
                batches = map(table.get_batch, range(table.num_record_batches))
            else:
                table = pyarrow.ipc.open_stream(stream)
                batches = iter(table)
        except (pyarrow.ArrowException, OSError, EOFError) as error:
            raise UserError(f"{file.name}: not a complete Arrow file: {error}") from None
        _check_columns(file, table.schema.names, columns)
        number, read = 0, partial(next, batches, None)
        while (rows := checked(file, read, f", row {number + 1}")) is not None:
            rows = rows.select(list(columns)) if columns else rows
            if number + len(rows) > first:
                yield _Batch(rows, number, 0, rows.nbytes // max(len(rows), 1))
            number += len(rows)


def _check_columns(file: File, names: Iterable[str], columns: dict[str, str]) -> None:
    """Refuses a table without one of the columns. `columns` has the option that sets each name."""
    for name, key in columns.items():
        if name not in names:
            raise UserError(f"{file.name}: no column {name!r}; its columns are {', '.join(names)}; set {key}")


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


def checked(file: File, read: Callable[[], T], position: str = "") -> T:
    """Calls `read`. Converts its errors into a `UserError` with the file and position."""
    try:
        return read()
    except UserError:
        raise
    except EOFError:
        raise UserError(f"{file.name}{position}: the file is truncated; copy it again") from None
    except Exception as error:  # noqa: BLE001  each compression format and file system has its own errors
        raise UserError(f"{file.name}{position}: cannot be read: {type(error).__name__}: {error}") from None
