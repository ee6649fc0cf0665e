"""One rank's file of a checkpoint: pieces of tensors in the safetensors format, whose header says of what whole each is a part.

A JSON header and plain bytes: there is nothing in it that could be executed, and any reader of safetensors opens it.
"""

import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from titanlike.config import UserError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
PART = 1 << 24  # bytes that are hashed, and written or read, at once
LONGEST_HEADER = 1 << 30


class CheckpointCorrupt(UserError):
    """A checkpoint is not what was saved; the message names the file."""


@dataclass(frozen=True)
class ShardRange:
    """Where a piece lies in a whole tensor."""

    whole: tuple[int, ...]  # shape of the tensor
    offset: tuple[int, ...]  # of the piece's first number
    shape: tuple[int, ...]  # of the piece


@dataclass(frozen=True)
class ShardSpec:
    """A part of a tensor, in memory."""

    name: str
    place: ShardRange
    values: Tensor  # on the host, contiguous, of the piece's shape


@dataclass(frozen=True)
class FileDigest:
    """What a file is recognised by."""

    size: int
    sha256: str


def write(stream: BinaryIO, pieces: Sequence[ShardSpec], notes: dict[str, Any]) -> FileDigest:
    """Write pieces, and notes for the reader, to an unbuffered stream."""
    places = {piece.name: [piece.place.whole, piece.place.offset] for piece in pieces}
    assert len(places) == len(pieces), "a rank has one piece of a tensor"
    metadata = {"format": "pt"} | {name: json.dumps(value) for name, value in {"places": places, **notes}.items()}
    kinds = {piece.name: (piece.values.dtype, piece.place.shape) for piece in pieces}
    values = {piece.name: piece.values for piece in pieces}
    return write_tensors(stream, kinds, values.__getitem__, metadata)


def write_tensors(
    stream: BinaryIO,
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Callable[[str], Tensor],
    metadata: dict[str, str],
) -> FileDigest:
    """Write tensors of these types and shapes, each of which is asked for when its turn comes. The hash is taken of what is
    written, on its way."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    order = sorted(kinds, key=lambda name: -kinds[name][0].itemsize)  # so that each begins at a multiple of its numbers
    end = 0
    for name in order:
        dtype, shape = kinds[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 64)
    found = hashlib.sha256()
    for whole in itertools.chain([_begin(header)], (_memory(values(name)) for name in order)):
        for start in range(0, len(whole), PART):
            part = whole[start : start + PART]
            found.update(part)
            write_all(stream, part)
    return FileDigest(8 + len(header) + end, found.hexdigest())


def write_all(stream: BinaryIO, content: memoryview) -> None:
    """Write to a stream without a buffer, which may take less than it is given."""
    while content:
        content = content[stream.write(content) :]


def _begin(header: bytes) -> memoryview:
    return memoryview(struct.pack("<Q", len(header)) + header)


def check(path: Path, expected: FileDigest, *, content: bool, name: str = "") -> None:
    """Raise `Damaged` if a file is not the one that was written: of another size or, where `content` is looked at, other.
    It goes by `name` if this is a copy of it."""
    name = name or str(path)
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise CheckpointCorrupt(f"{name} has {size:,} bytes of {expected.size:,}")
        if not content:
            return
        found = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            while part := stream.read(PART):
                found.update(part)
    except OSError as error:
        raise CheckpointCorrupt(f"{name} cannot be read: {error.strerror}") from None
    if found.hexdigest() != expected.sha256:
        raise CheckpointCorrupt(f"{name} is damaged: its content is not what was written")


@dataclass(frozen=True)
class Entry:
    """A piece, in a file."""

    place: ShardRange
    dtype: torch.dtype
    start: int  # of its bytes in the file


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    path: Path
    entries: dict[str, Entry]
    notes: dict[str, Any]


def read_header(path: Path) -> Header:
    """What lies where in a file. Everything is looked at before it is believed."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            found = json.loads(stream.read(length))
            metadata = {name: json.loads(text) for name, text in found.pop("__metadata__").items() if name != "format"}
            places = metadata.pop("places")
            entries = {name: _entry(name, said, places[name], 8 + length, size) for name, said in found.items()}
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is not a file of a checkpoint: {error}") from None
    return Header(path, entries, metadata)


def _entry(name: str, said: dict[str, Any], place: list[Any], first: int, size: int) -> Entry:
    dtype = DTYPES[said["dtype"]]
    shape, whole, offset = (tuple(numbers) for numbers in (said["shape"], *place))
    start, end = said["data_offsets"]
    numbers = (*shape, *whole, *offset, start, end)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"{name} has a place that is not made of whole numbers")
    inside = len(shape) == len(whole) == len(offset) and all(
        o + s <= w for o, s, w in zip(offset, shape, whole, strict=True)
    )
    if not inside or end - start != math.prod(shape) * dtype.itemsize or first + end > size:
        raise ValueError(f"{name} does not lie where it is said to")
    return Entry(ShardRange(whole, offset, shape), dtype, first + start)


class Reader:
    """Fills tensors from the files of a checkpoint. Opens a file when a piece is not in those opened before, so that who
    asks for what one rank saved needs that rank's file alone."""

    def __init__(self, files: Iterable[Callable[[], Path]]) -> None:
        """`files` are in the order in which they are to be opened; each is called for its path."""
        self.unopened = list(files)
        self.opened: list[Header] = []

    def headers(self) -> Iterator[Header]:
        """What the files say, those that are open first."""
        number = 0
        while number < len(self.opened) or self.unopened:
            if number == len(self.opened):
                self.opened.append(read_header(self.unopened.pop(0)()))
            yield self.opened[number]
            number += 1

    def fill(self, name: str, target: Tensor, place: ShardRange) -> bool:
        """Copy into `target`, which has `place` in the whole tensor, what was saved of it, whoever saved it. Returns whether
        there is a tensor of this name."""
        missing, found = target.numel(), False
        copied: set[tuple[int, ...]] = set()  # by where they begin: some pieces are there more than once
        for header in self.headers():
            entry = header.entries.get(name)
            found |= entry is not None
            if entry and entry.place.offset not in copied:
                missing -= _copy(header, name, target, place)
                copied.add(entry.place.offset)
            if not missing:
                break  # before another file is opened
        if found and missing:
            raise CheckpointCorrupt(
                f"the checkpoint lacks {missing:,} of the {target.numel():,} numbers wanted of {name}"
            )
        return found


def _copy(header: Header, name: str, target: Tensor, place: ShardRange) -> int:
    """Copy what a file has of a place. Returns how many numbers that is."""
    entry = header.entries[name]
    theirs = entry.place
    if theirs.whole != place.whole or entry.dtype != target.dtype:
        raise UserError(
            f"{header.path}: {name} is {entry.dtype} of shape {theirs.whole}, but {target.dtype} of {place.whole} is wanted"
        )
    corners = zip(theirs.offset, theirs.shape, place.offset, place.shape, strict=True)
    overlap = [(max(a, b), min(a + m, b + n)) for a, m, b, n in corners]
    if any(start >= end for start, end in overlap):
        return 0
    into = tuple(slice(start - o, end - o) for (start, end), o in zip(overlap, place.offset, strict=True))
    inside = [slice(start - o, end - o) for (start, end), o in zip(overlap, theirs.offset, strict=True)]
    target[into].copy_(_read(header.path, entry, inside))
    return math.prod(end - start for start, end in overlap)


def _read(path: Path, entry: Entry, part: list[slice]) -> Tensor:
    """A part of a piece. Of its rows, those wanted are read, and no more."""
    shape = entry.place.shape
    rows = part[0] if part else slice(0, 1)
    row = math.prod(shape[1:]) * entry.dtype.itemsize
    values = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=entry.dtype)
    memory = _memory(values)
    try:
        with path.open("rb", buffering=0) as stream:
            stream.seek(entry.start + rows.start * row)
            while memory:
                taken = stream.readinto(memory)
                if not taken:
                    raise CheckpointCorrupt(f"{path} ends too early")
                memory = memory[taken:]
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror}") from None
    return values[tuple([slice(None), *part[1:]])] if part else values[0]


def _memory(values: Tensor) -> memoryview:
    return memoryview(cast(Any, values.view(-1).view(torch.uint8).numpy()))
