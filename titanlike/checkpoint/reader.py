"""Reads checkpoint files, which are not trusted: headers, hashes, and the parts of tensors that a rank needs."""

import errno
import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanlike.checkpoint.files import ReadableFile
from titanlike.checkpoint.format import CHUNK_SIZE, DTYPES, CheckpointCorrupt, FileDigest, ShardRange
from titanlike.config import UserError
from titanlike.config.base import shown

# What the system reports of something that is not there, or is not a file. Of other errors, a disk or a server is the cause.
NO_FILE = {None, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ELOOP}


@contextmanager
def corrupt_unless_read(file: ReadableFile | str) -> Iterator[None]:
    """Raises `CheckpointCorrupt` instead of the errors that reading and parsing a file raises, or `UserError` if the file may be
    valid, but cannot be read now."""
    try:
        yield
    except UserError:  # a ValueError that names the file already
        raise
    except OSError as error:
        kind = CheckpointCorrupt if error.errno in NO_FILE else UserError
        raise kind(f"{file} cannot be read: {error.strerror or error}") from None
    except KeyError as error:
        raise CheckpointCorrupt(f"{file} is corrupt: it lacks {shown(str(error))}") from None
    except (TypeError, AttributeError):
        raise CheckpointCorrupt(f"{file} is corrupt: a value in it is missing, unknown or of another type") from None
    except (ValueError, struct.error, RecursionError) as error:
        raise CheckpointCorrupt(f"{file} is corrupt: {error}") from None


def verify_file(file: ReadableFile, expected: FileDigest, *, content: bool) -> None:
    """Raises `CheckpointCorrupt` if the size of a file or, with `content`, its hash is not the expected one."""
    with corrupt_unless_read(file):
        size = file.size()
        if size != expected.size:
            raise ValueError(f"{size:,} bytes, expected {expected.size:,}")
        if not content:
            return
        digest = hashlib.sha256()
        for start in range(0, size, CHUNK_SIZE):
            digest.update(file.read(start, min(CHUNK_SIZE, size - start)).data)
        if digest.hexdigest() != expected.sha256:
            raise ValueError("SHA-256 mismatch")


@dataclass(frozen=True)
class Entry(ShardRange):
    """A tensor shard in a file."""

    dtype: torch.dtype
    start: int  # of its bytes in the file


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    file: ReadableFile
    entries: dict[str, Entry]
    notes: dict[str, Any]


def read_header(file: ReadableFile, *, whole: bool = False) -> Header:
    """Reads and validates the header of a file, which is not trusted. With `whole`, every tensor is its only shard, as in the files
    of other programs."""
    with corrupt_unless_read(file):
        size = file.size()
        (length,) = struct.unpack("<Q", file.read(0, 8).tobytes())
        if length > size - 8:
            raise ValueError("the header is longer than the file")
        fields = json.loads(file.read(8, length).tobytes())
        metadata = fields.pop("__metadata__", {})
        if whole:
            ranges = {name: [field["shape"], [0] * len(field["shape"])] for name, field in fields.items()}
        else:
            metadata = {name: json.loads(text) for name, text in metadata.items() if name != "format"}
            ranges = metadata.pop("shards")
        entries = {name: _entry(name, field, ranges[name], 8 + length) for name, field in fields.items()}
        end = max((field["data_offsets"][1] for field in fields.values()), default=0)
        if end != size - 8 - length:
            raise ValueError(f"its tensors have {end:,} bytes, but the file has {size - 8 - length:,} for them")
        return Header(file, entries, metadata)


def _entry(name: str, field: dict[str, Any], shard_range: list[Any], data_start: int) -> Entry:
    if field["dtype"] not in DTYPES:
        raise ValueError(f"{shown(name)} has the dtype {shown(str(field['dtype']))}, which is not supported")
    dtype = DTYPES[field["dtype"]]
    shape, global_shape, offset = (tuple(numbers) for numbers in (field["shape"], *shard_range))
    offsets = field["data_offsets"]
    numbers = (*shape, *global_shape, *offset, *offsets)
    if len(offsets) != 2 or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{shown(name)}: shapes and offsets must be non-negative integers")
    start, end = offsets
    inside = len(shape) == len(global_shape) == len(offset) and all(
        o + n <= total for o, n, total in zip(offset, shape, global_shape, strict=True)
    )
    if not inside or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{shown(name)}: the shard exceeds its tensor, or has another number of bytes than its shape")
    return Entry(global_shape, offset, shape, dtype, data_start + start)


class TensorReader:
    """Fills tensors from the files of a checkpoint, whatever layout saved them. Reads only the rows that a tensor needs."""

    def __init__(self, headers: Iterable[Header]) -> None:
        """Takes the headers of all files, in the order in which they are searched."""
        self.headers = list(headers)

    def fill(self, name: str, target: Tensor, shard_range: ShardRange) -> bool:
        """Copies the values of `shard_range` into `target`. Returns False if the checkpoint has no tensor of this name."""
        missing, found = target.numel(), False
        copied: set[tuple[int, ...]] = set()  # offsets: replicated shards may be stored more than once
        for header in self.headers:
            entry = header.entries.get(name)
            found |= entry is not None
            if entry and entry.offset not in copied:
                missing -= _copy_overlap(header.file, name, entry, target, shard_range)
                copied.add(entry.offset)
            if not missing:
                break
        if found and missing:
            raise CheckpointCorrupt(f"the checkpoint lacks {missing:,} of {target.numel():,} elements of {name}")
        return found


def _copy_overlap(file: ReadableFile, name: str, entry: Entry, target: Tensor, shard_range: ShardRange) -> int:
    """Copies the overlap of a stored shard and `shard_range`. Returns the number of elements copied."""
    # An earlier version may have stored another precision, such as for the balancing bias of experts.
    converts = entry.dtype.is_floating_point and target.dtype.is_floating_point
    if entry.global_shape != shard_range.global_shape or (entry.dtype != target.dtype and not converts):
        raise UserError(
            f"{file}: {name} is {entry.dtype} of shape {entry.global_shape}, expected {target.dtype} of shape "
            f"{shard_range.global_shape}"
        )
    bounds = zip(entry.offset, entry.shape, shard_range.offset, shard_range.shape, strict=True)
    overlap = [(max(a, b), min(a + m, b + n)) for a, m, b, n in bounds]
    if any(start >= end for start, end in overlap):
        return 0
    into = tuple(slice(start - o, end - o) for (start, end), o in zip(overlap, shard_range.offset, strict=True))
    stored = [slice(start - o, end - o) for (start, end), o in zip(overlap, entry.offset, strict=True)]
    target[into].copy_(read_part(file, entry, stored))
    return math.prod(end - start for start, end in overlap)


def read_part(file: ReadableFile, entry: Entry, part: list[slice]) -> Tensor:
    """Reads a part of a shard; of its rows, only those in the part."""
    rows = part[0] if part else slice(0, 1)
    row_size = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    size = (rows.stop - rows.start) * row_size
    with corrupt_unless_read(file):
        content = file.read(entry.start + rows.start * row_size, size)
        if len(content) < size:
            raise ValueError("unexpected end of file")
    values = torch.from_numpy(content).view(entry.dtype).view(-1, *entry.shape[1:])
    return values[tuple([slice(None), *part[1:]])] if part else values[0]
