"""The units of a preparation: pieces of the input that each make one shard of each split. No torch.

What the units are, and what is made of them, depends on the inputs and the options alone: not on the number of processes, nor
on how often they were killed.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.text.documents import (
    LINES,
    PARQUET,
    BadRecord,
    Fields,
    open_parquet,
    read_pieces,
    row_groups,
)
from titanlike.data.text.files import File, is_address, open_file
from titanlike.data.text.tokenizer import Tokenizer
from titanlike.data.token_shards import TRAIN, VALIDATION, Shard, ShardWriter

SMALLEST, LARGEST = 4 * 2**20, 256 * 2**20  # bytes of a unit
MANY = 256  # units of a text that makes neither the smallest nor the largest ones
SHOWN = 5  # bad records of which the text is kept
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Seen = Callable[[int, int], None]  # told of so many bytes read and so many tokens made, since the last time


@dataclass(frozen=True)
class FileSpan:
    """A file, or a span of it: bytes of lines, row groups of Parquet."""

    file: File
    size: int  # bytes, about
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class WorkUnit:
    """What makes one shard of each split."""

    number: int
    parts: tuple[FileSpan, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Options:
    """What is made of the units."""

    folder: Path
    tokenizer: Section
    fields: Fields
    validation_share: float
    skip: bool  # bad records, rather than stop at the first


@dataclass
class WorkUnitResult:
    """What a unit has become."""

    unit: int
    splits: dict[str, Shard] = field(default_factory=dict)
    text_bytes: int = 0
    empty: int = 0  # documents without text
    skipped: int = 0  # bad records
    examples: list[str] = field(default_factory=list)  # the first of them

    @staticmethod
    def path(folder: Path, unit: int) -> Path:
        """Where it is kept."""
        return folder / f"unit-{unit:05d}.json"

    def write(self, folder: Path) -> None:
        """Keep it. The shards' names are on the disk before it, and it before anything that counts on it."""
        sync(folder)
        write_whole(self.path(folder, self.unit), json.dumps(asdict(self)))
        sync(folder)

    @classmethod
    def read(cls, folder: Path, unit: int, width: int) -> "WorkUnitResult | None":
        """What was kept of a unit that is done, all of whose files are there; else None."""
        try:
            values = json.loads(cls.path(folder, unit).read_text())
            shards = {split: Shard(**shard) for split, shard in values.pop("splits").items()}
            sizes = {f"{shard.name}.tokens": shard.tokens * width for shard in shards.values()}
            sizes |= {f"{shard.name}.documents": shard.documents * 16 for shard in shards.values()}
            whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
            return cls(splits=shards, **values) if whole else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def split_work_units(files: Sequence[File]) -> list[WorkUnit]:
    """Cut the files, in their order, into units of about one size. Small files share a unit, large ones are cut where they can
    be: between lines, or between the row groups of Parquet."""
    most = min(max(sum(file.size for file in files) // MANY, SMALLEST), LARGEST)
    units: list[tuple[FileSpan, ...]] = []
    small: list[FileSpan] = []  # that share the next unit
    room = most
    for file in files:
        parts = _cut(file, most)
        alone = len(parts) > 1 or (file.size == 0 and is_address(file.name))  # of unknown size
        if small and (alone or file.size > room):
            units.append(tuple(small))
            small, room = [], most
        if alone:
            units += [(part,) for part in parts]
        else:
            small += parts
            room -= file.size
    if small:
        units.append(tuple(small))
    return [WorkUnit(number, parts) for number, parts in enumerate(units)]


def _cut(file: File, most: int) -> list[FileSpan]:
    """A file in parts of about `most` bytes."""
    whole = [FileSpan(file, file.size)]
    if file.size <= most or file.compressed:
        return whole
    count = -(-file.size // most)
    if file.kind in LINES and _can_begin_within(file):
        places = [file.size * number // count for number in range(count + 1)]
        return [FileSpan(file, places[n + 1] - places[n], (places[n], places[n + 1])) for n in range(count)]
    if file.kind == PARQUET:
        with open_parquet(file) as table:
            rows = row_groups(table)
        return list(_cut_groups(file, rows, count)) or whole
    return whole


def _cut_groups(file: File, rows: list[int], count: int) -> Iterator[FileSpan]:
    first, held, total = 0, 0, max(sum(rows), 1)
    for group, number in enumerate(rows):
        held += number
        if held * count >= total or group == len(rows) - 1:
            yield FileSpan(file, file.size * held // total, (first, group + 1))
            first, held = group + 1, 0


def _can_begin_within(file: File) -> bool:
    """Not all web servers can."""
    if not is_address(file.name):
        return True
    with open_file(file) as stream:
        try:
            stream.seek(file.size // 2)
            return bool(stream.read(1))
        except (OSError, ValueError):
            return False


def make(unit: WorkUnit, options: Options, tokenizer: Tokenizer, seen: Seen) -> WorkUnitResult:
    """Make the shards of a unit, and what is kept of it."""
    writers: dict[str, ShardWriter] = {}
    done = WorkUnitResult(unit.number)
    with writing(options.folder):
        try:
            for part in unit.parts:
                _read(part, done, options, tokenizer, writers, seen)
            done.splits = {split: writer.close() for split, writer in writers.items()}
            done.write(options.folder)
        except BaseException:
            for writer in writers.values():
                writer.drop()
            raise
    return done


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say what is wrong with the folder that is written in here."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise UserError(
                f"{folder}: the disk is full ({error.strerror}); make room, and the same command goes on from here"
            ) from None
        raise UserError(f"{folder} cannot be written: {error}") from None


def _read(
    part: FileSpan,
    done: WorkUnitResult,
    options: Options,
    tokenizer: Tokenizer,
    writers: dict[str, ShardWriter],
    seen: Seen,
) -> None:
    def bad(problem: BadRecord) -> None:
        done.skipped += 1
        if len(done.examples) < SHOWN:
            done.examples.append(str(problem))

    first, split, left = True, TRAIN, part.size
    skip = bad if options.skip else None
    for piece in read_pieces(part.file, options.fields, span=part.span, bad=skip):
        if not piece.text and first and piece.last:
            done.empty += 1
            continue
        content = piece.text.encode()
        if first:
            split = split_of(content, options.validation_share)
        if split not in writers:
            writers[split] = ShardWriter(options.folder, f"{split}-{done.unit:05d}", tokenizer.dtype)
        tokens, given = tokenizer.document(piece.text, piece.prompt, first=first, last=piece.last)
        writers[split].add(tokens, given, last=piece.last)
        done.text_bytes += len(content)
        first = piece.last
        read = min(piece.size, left)
        left -= read
        seen(read, len(tokens))
    _check_unchanged(part.file)
    seen(left, 0)


def split_of(content: bytes, validation_share: float) -> str:
    """Where a document belongs, by its text, or its first piece: wherever it stands, and however often."""
    if not validation_share:
        return TRAIN
    drawn = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return VALIDATION if drawn < validation_share * 2**64 else TRAIN


def _check_unchanged(file: File) -> None:
    if is_address(file.name):
        return
    found = Path(file.name).stat() if Path(file.name).exists() else None
    if found is None or (found.st_size, str(found.st_mtime_ns)) != (file.size, file.version):
        raise UserError(f"{file.name}: was changed while it was read; run the command again when it is whole")


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sync(folder: Path) -> None:
    """Let the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
