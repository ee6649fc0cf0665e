"""Work units of a data preparation: each is a part of the input that becomes one shard per split. No torch.

Work units and their shards depend on the inputs and options only, not on the number of processes or on interruptions.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.text.documents import LINES, PARQUET, BadRecord, Fields, open_parquet, read_chunks, row_groups
from titanlike.data.text.files import File, convert_write_errors, is_address, open_file
from titanlike.data.text.tokenizer import Tokenizer
from titanlike.data.token_shards import TRAIN, VALIDATION, Shard, ShardWriter
from titanlike.utils.atomic_io import atomic_write_text, fsync_directory

MIN_SIZE, MAX_SIZE = 4 * 2**20, 256 * 2**20  # bytes of a work unit
TARGET_COUNT = 256  # work units, where their size is within these limits
RESULT = "unit-{:05d}.json"
MAX_EXAMPLES = 5  # bad records whose error messages are kept

ReportProgress = Callable[[int, int], None]  # receives numbers of bytes read and tokens made


@dataclass(frozen=True)
class FileSpan:
    """A file, or a range of it."""

    file: File
    size: int  # bytes, estimated for Parquet
    bounds: tuple[int, int] | None = (
        None  # byte offsets of JSON lines, or row groups of Parquet; None: the complete file
    )


@dataclass(frozen=True)
class WorkUnit:
    """The input of one shard per split."""

    number: int
    spans: tuple[FileSpan, ...]

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)


@dataclass(frozen=True)
class Options:
    """Options that apply to all work units."""

    folder: Path
    tokenizer: Section
    fields: Fields
    validation_share: float
    skip_bad_records: bool


@dataclass
class WorkUnitResult:
    """The shards and statistics of a finished work unit."""

    unit: int
    splits: dict[str, Shard] = field(default_factory=dict)
    text_bytes: int = 0
    empty: int = 0  # documents without text
    skipped: int = 0  # bad records
    examples: list[str] = field(default_factory=list)  # error messages of the first bad records

    def write(self, folder: Path) -> None:
        """Writes the result durably, after the names of its shards are durable."""
        fsync_directory(folder)
        atomic_write_text(folder / RESULT.format(self.unit), json.dumps(asdict(self)))
        fsync_directory(folder)

    @classmethod
    def read(cls, folder: Path, unit: int, token_bytes: int) -> "WorkUnitResult | None":
        """Reads a result. Returns None if there is none, or if a file of its shards is missing or has another size."""
        try:
            values = json.loads((folder / RESULT.format(unit)).read_text())
            shards = {split: Shard(**shard) for split, shard in values.pop("splits").items()}
            sizes = {f"{shard.name}.tokens": shard.tokens * token_bytes for shard in shards.values()}
            sizes |= {f"{shard.name}.documents": shard.documents * 16 for shard in shards.values()}
            complete = all((folder / name).stat().st_size == size for name, size in sizes.items())
            return cls(splits=shards, **values) if complete else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def split_work_units(files: Sequence[File]) -> list[WorkUnit]:
    """Splits files, in their order, into work units of similar size.

    Small files share a work unit. Large files are split where the format permits: between lines, or between the row groups of
    Parquet.
    """
    limit = min(max(sum(file.size for file in files) // TARGET_COUNT, MIN_SIZE), MAX_SIZE)
    groups: list[list[FileSpan]] = []
    room = 0  # bytes that may be added to the last group
    for file in files:
        spans = _split_file(file, limit)
        unknown_size = file.size == 0 and is_address(file.name)
        if len(spans) > 1 or unknown_size:
            groups += [[span] for span in spans]
            room = -1
        elif groups and file.size <= room:
            groups[-1] += spans
            room -= file.size
        else:
            groups.append(spans)
            room = limit - file.size
    return [WorkUnit(number, tuple(spans)) for number, spans in enumerate(groups)]


def _split_file(file: File, limit: int) -> list[FileSpan]:
    """Splits a file into spans of about `limit` bytes. A file that cannot be split is one span."""
    count = -(-file.size // limit)
    if count > 1 and not file.compressed:
        if file.kind in LINES and _is_seekable(file):
            offsets = [file.size * number // count for number in range(count + 1)]
            return [FileSpan(file, stop - start, (start, stop)) for start, stop in pairwise(offsets)]
        if file.kind == PARQUET:
            with open_parquet(file) as table:
                rows = row_groups(table)
            if rows:
                return list(_split_row_groups(file, rows, count))
    return [FileSpan(file, file.size)]


def _split_row_groups(file: File, rows: list[int], count: int) -> Iterator[FileSpan]:
    first, pending, total = 0, 0, max(sum(rows), 1)
    for group, num_rows in enumerate(rows):
        pending += num_rows
        if pending * count >= total or group == len(rows) - 1:
            yield FileSpan(file, file.size * pending // total, (first, group + 1))
            first, pending = group + 1, 0


def _is_seekable(file: File) -> bool:
    """Checks that reading can begin in the middle of a file, which some web servers do not support."""
    if not is_address(file.name):
        return True
    with open_file(file) as stream:
        try:
            stream.seek(file.size // 2)
            return bool(stream.read(1))
        except (OSError, ValueError):
            return False


def process_work_unit(unit: WorkUnit, options: Options, tokenizer: Tokenizer, report: ReportProgress) -> WorkUnitResult:
    """Tokenizes a work unit into shards and writes its result."""
    writers: dict[str, ShardWriter] = {}
    result = WorkUnitResult(unit.number)

    def skip(problem: BadRecord) -> None:
        result.skipped += 1
        if len(result.examples) < MAX_EXAMPLES:
            result.examples.append(str(problem))

    def tokenize(span: FileSpan) -> None:
        first, split, unread = True, TRAIN, span.size
        on_bad_record = skip if options.skip_bad_records else None
        for chunk in read_chunks(span.file, options.fields, span=span.bounds, bad=on_bad_record):
            if not chunk.text and first and chunk.last:
                result.empty += 1
                continue
            content = chunk.text.encode()
            if first:
                split = split_of(content, options.validation_share)
            if split not in writers:
                writers[split] = ShardWriter(options.folder, f"{split}-{unit.number:05d}", tokenizer.dtype)
            tokens, prompt_length = tokenizer.document(chunk.text, chunk.prompt, first=first, last=chunk.last)
            writers[split].add(tokens, prompt_length, last=chunk.last)
            result.text_bytes += len(content)
            first = chunk.last
            read = min(chunk.size, unread)
            unread -= read
            report(read, len(tokens))
        _check_unchanged(span.file)
        report(unread, 0)

    with convert_write_errors(options.folder):
        try:
            for span in unit.spans:
                tokenize(span)
            result.splits = {split: writer.close() for split, writer in writers.items()}
            result.write(options.folder)
        except BaseException:
            for writer in writers.values():
                writer.drop()
            raise
    return result


def split_of(content: bytes, validation_share: float) -> str:
    """Returns the split of a document. It depends on the text only (of a long document, on its first chunk), so copies agree."""
    if not validation_share:
        return TRAIN
    value = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return VALIDATION if value < validation_share * 2**64 else TRAIN


def _check_unchanged(file: File) -> None:
    if is_address(file.name):
        return
    stat = Path(file.name).stat() if Path(file.name).exists() else None
    if stat is None or (stat.st_size, str(stat.st_mtime_ns)) != (file.size, file.version):
        raise UserError(f"{file.name}: changed while it was read; run the command again when the file is complete")
