"""Checkpoint files: resharding on read, verification, and rejection of corrupt or hostile files."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlike.checkpoint.files import LocalFile
from titanlike.checkpoint.format import DTYPES, CheckpointCorrupt, FileDigest, ShardRange, ShardSpec, write
from titanlike.checkpoint.reader import TensorReader, read_header, verify_file
from titanlike.config import UserError


def full_range(tensor: torch.Tensor) -> ShardRange:
    return ShardRange(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))


def shard(name: str, tensor: torch.Tensor, rows: slice, columns: slice) -> ShardSpec:
    values = tensor[rows, columns].contiguous()
    return ShardSpec(name, ShardRange(tuple(tensor.shape), (rows.start, columns.start), tuple(values.shape)), values)


def save(path: Path, *shards: ShardSpec, **notes: Any) -> FileDigest:
    with path.open("xb", buffering=0) as stream:
        return write(stream, shards, notes)  # type: ignore[arg-type]


def reader(*paths: Path) -> TensorReader:
    return TensorReader(read_header(LocalFile(path)) for path in paths)


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_round_trips(tmp_path: Path, code: str) -> None:
    bits = torch.randint(0, 2 if code == "BOOL" else 256, (7, 24), dtype=torch.uint8)
    tensor = bits.view(DTYPES[code])
    save(
        tmp_path / "a",
        ShardSpec("t", full_range(tensor), tensor),
        ShardSpec("one", ShardRange((), (), ()), torch.tensor(3.5)),
    )
    found, one = torch.zeros_like(bits).view(DTYPES[code]), torch.zeros(())
    assert reader(tmp_path / "a").fill("t", found, full_range(tensor))
    assert reader(tmp_path / "a").fill("one", one, ShardRange((), (), ()))
    assert torch.equal(found.view(torch.uint8), bits)
    assert one == 3.5


def test_files_conform_to_the_safetensors_format(tmp_path: Path) -> None:
    """Parses a file by the definition of the format: a length, a JSON header, and bytes at offsets from its end."""
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    save(tmp_path / "a", *(ShardSpec(name, full_range(t), t) for name, t in tensors.items()))
    content = (tmp_path / "a").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values())
    assert header["b"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert header["a"] == {"dtype": "U8", "shape": [3], "data_offsets": [24, 27]}
    assert data == tensors["b"].numpy().tobytes() + b"\1\2\3"
    assert (8 + length) % 8 == 0


def test_shards_of_one_layout_are_filled_from_shards_of_another(tmp_path: Path) -> None:
    tensor = torch.arange(10 * 6).view(10, 6)
    layout = [(slice(0, 4), slice(0, 6)), (slice(4, 10), slice(0, 2)), (slice(4, 10), slice(2, 6))]
    layout.append(layout[0])  # a replica
    paths = [tmp_path / str(number) for number in range(4)]
    for path, slices in zip(paths, layout, strict=True):
        save(path, shard("t", tensor, *slices))
    for rows in (slice(0, 10), slice(3, 5), slice(9, 10)):
        for columns in (slice(0, 6), slice(1, 3), slice(5, 6)):
            expected = tensor[rows, columns]
            found = torch.zeros_like(expected)
            reader(*paths).fill("t", found, ShardRange((10, 6), (rows.start, columns.start), tuple(expected.shape)))
            assert torch.equal(found, expected)


def test_only_the_rows_of_a_shard_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(12).view(4, 3)
    for number, rows in enumerate((slice(0, 2), slice(2, 4))):
        save(tmp_path / str(number), shard("t", tensor, rows, slice(0, 3)))
    files = reader(tmp_path / "0", tmp_path / "1")
    sizes: list[tuple[str, int]] = []
    read = LocalFile.read
    monkeypatch.setattr(
        LocalFile, "read", lambda file, start, size: sizes.append((file.path.name, size)) or read(file, start, size)
    )
    for first, expected in ((0, [("0", 48)]), (1, [("0", 24), ("1", 24)]), (3, [("1", 24)])):
        found = torch.zeros(min(2, 4 - first), 3, dtype=torch.int64)
        assert files.fill("t", found, ShardRange((4, 3), (first, 0), tuple(found.shape)))
        assert torch.equal(found, tensor[first : first + 2])
        assert sizes == expected
        sizes.clear()


def test_missing_elements_and_mismatched_tensors_are_refused(tmp_path: Path) -> None:
    tensor = torch.arange(12).view(4, 3)
    save(tmp_path / "a", shard("t", tensor, slice(0, 2), slice(0, 3)))
    assert not reader(tmp_path / "a").fill("other", torch.zeros(1), ShardRange((1,), (0,), (1,)))
    with pytest.raises(CheckpointCorrupt, match="lacks 6 of 12 elements of t"):
        reader(tmp_path / "a").fill("t", torch.zeros_like(tensor), full_range(tensor))
    with pytest.raises(
        UserError, match=r"t is torch.int64 of shape \(4, 3\), expected torch.float32 of shape \(4, 3\)"
    ):
        reader(tmp_path / "a").fill("t", tensor.float(), full_range(tensor))
    with pytest.raises(UserError, match=r"of shape \(4, 3\), expected torch.int64 of shape \(3, 4\)"):
        reader(tmp_path / "a").fill("t", tensor.view(3, 4), full_range(tensor.view(3, 4)))


def test_verification_detects_every_flipped_bit_and_missing_byte(tmp_path: Path) -> None:
    tensor = torch.arange(100.0)
    path = tmp_path / "a"
    digest = save(path, ShardSpec("t", full_range(tensor), tensor), generators={"torch": "00"})
    verify_file(LocalFile(path), digest, content=True)
    content = path.read_bytes()
    assert digest.size == len(content)
    for position in (0, 9, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        verify_file(LocalFile(path), digest, content=False)
        with pytest.raises(CheckpointCorrupt, match="a is corrupt: SHA-256 mismatch"):
            verify_file(LocalFile(path), digest, content=True)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointCorrupt, match=f"a is corrupt: {len(content) - 1:,} bytes, expected {len(content):,}"):
        verify_file(LocalFile(path), digest, content=False)
    path.unlink()
    with pytest.raises(CheckpointCorrupt, match="a cannot be read: No such file or directory"):
        verify_file(LocalFile(path), digest, content=False)


def file_with(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


META = {"shards": json.dumps({"t": [[2], [0]]})}
GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2**64 - 1),
        file_with(b"[" * 100_000),
        file_with(b"\xff\xfe{}"),
        file_with({}),
        file_with({"__metadata__": {}}),
        file_with({"__metadata__": META, "t": {**GOOD, "dtype": "object"}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "data_offsets": [8, 16]}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "data_offsets": [0, 4]}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "shape": [4]}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "shape": [2, 1]}}, bytes(8)),
        file_with({"__metadata__": META, "u": GOOD}, bytes(8)),
        file_with({"__metadata__": {"shards": json.dumps({"t": [[2], [1]]})}, "t": GOOD}, bytes(8)),
        file_with({"__metadata__": {"shards": json.dumps({"t": [[2], [-1]]})}, "t": GOOD}, bytes(8)),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"a is corrupt: "):
        read_header(LocalFile(tmp_path / "a"))


def test_the_valid_header_behind_the_hostile_ones_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(file_with({"__metadata__": META, "t": GOOD}, bytes(8)))
    assert list(read_header(LocalFile(tmp_path / "a")).entries) == ["t"]


class PartialWriter(io.RawIOBase):
    """A stream that writes at most 1000 bytes at a time, as a raw file may."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, part: Any) -> int:
        self.content += bytes(part[:1000])
        return min(len(part), 1000)


def test_partial_writes_are_completed(tmp_path: Path) -> None:
    tensor = torch.arange(5000.0)
    stream = PartialWriter()
    digest = write(stream, [ShardSpec("t", full_range(tensor), tensor)], {})  # type: ignore[arg-type]
    (tmp_path / "a").write_bytes(stream.content)
    verify_file(LocalFile(tmp_path / "a"), digest, content=True)
