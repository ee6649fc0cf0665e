"""Checkpoint files: the tensor shards of one rank, in the safetensors format.

The header's metadata records the global shape and the offset of every shard. A file consists of a JSON header and raw bytes:
nothing in it can be executed, and any safetensors reader opens it. `reader.py` reads it.
"""

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from titanlike.config import UserError
from titanlike.utils.atomic_write import write_all

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK_SIZE = 1 << 24  # bytes that are hashed, and written or read, at a time


class CheckpointCorrupt(UserError):
    """A checkpoint file is missing, unreadable or not as it was written. The message names the file."""


@dataclass(frozen=True)
class ShardRange:
    """Position of a shard in its global tensor."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardSpec:
    """A tensor shard in host memory."""

    name: str
    shard_range: ShardRange
    values: Tensor  # contiguous


@dataclass(frozen=True)
class FileDigest:
    """Size and hash of a file."""

    size: int
    sha256: str


def write(stream: BinaryIO, shards: Sequence[ShardSpec], notes: dict[str, Any]) -> FileDigest:
    """Writes shards and JSON-serializable notes to an unbuffered stream."""
    ranges = {shard.name: [shard.shard_range.global_shape, shard.shard_range.offset] for shard in shards}
    assert len(ranges) == len(shards), "a rank has one shard of a tensor"
    metadata = {name: json.dumps(value) for name, value in {"shards": ranges, **notes}.items()}
    values = {shard.name: shard.values for shard in shards}
    return write_tensors(stream, values, values.__getitem__, metadata)


def write_tensors(
    stream: BinaryIO, specs: Mapping[str, Tensor], read: Callable[[str], Tensor], metadata: dict[str, str]
) -> FileDigest:
    """Writes a safetensors file to an unbuffered stream, and computes its hash on the way. `specs` have the dtypes and shapes of
    the tensors, and may be on the meta device. `read` returns the values; it is called right before a tensor is written."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}
    names = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)  # aligns each tensor to its element size
    end = 0
    for name in names:
        spec = specs[name]
        start, end = end, end + spec.nbytes
        entries[name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 64)
    digest = hashlib.sha256()
    prefix = memoryview(struct.pack("<Q", len(header)) + header)
    for content in itertools.chain([prefix], (_as_bytes(read(name)) for name in names)):
        for start in range(0, len(content), CHUNK_SIZE):
            chunk = content[start : start + CHUNK_SIZE]
            digest.update(chunk)
            write_all(stream, chunk)
    return FileDigest(len(prefix) + end, digest.hexdigest())


def _as_bytes(values: Tensor) -> memoryview:
    return memoryview(cast(Any, values.view(-1).view(torch.uint8).numpy()))
