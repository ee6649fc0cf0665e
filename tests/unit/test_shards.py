"""Pieces of tensors in files: what is written is read, by boxes of any cut; what is damaged or hostile is named."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlike.checkpoint.format import (
    DTYPES,
    CheckpointCorrupt,
    FileDigest,
    Reader,
    ShardRange,
    ShardSpec,
    check,
    read_header,
    write,
)
from titanlike.config import UserError


def whole_of(tensor: torch.Tensor) -> ShardRange:
    return ShardRange(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))


def piece(name: str, tensor: torch.Tensor, rows: slice, columns: slice) -> ShardSpec:
    values = tensor[rows, columns].contiguous()
    return ShardSpec(name, ShardRange(tuple(tensor.shape), (rows.start, columns.start), tuple(values.shape)), values)


def save(path: Path, *pieces: ShardSpec, **notes: Any) -> FileDigest:
    with path.open("xb", buffering=0) as stream:
        return write(stream, pieces, notes)  # type: ignore[arg-type]


def reader(*paths: Path) -> Reader:
    return Reader([lambda path=path: path for path in paths])  # type: ignore[misc]


@pytest.mark.parametrize("code", DTYPES)
def test_every_type_of_number_comes_back_as_it_was(tmp_path: Path, code: str) -> None:
    bits = torch.randint(0, 2 if code == "BOOL" else 256, (7, 24), dtype=torch.uint8)
    tensor = bits.view(DTYPES[code])
    save(
        tmp_path / "a",
        ShardSpec("t", whole_of(tensor), tensor),
        ShardSpec("one", ShardRange((), (), ()), torch.tensor(3.5)),
    )
    found, one = torch.zeros_like(bits).view(DTYPES[code]), torch.zeros(())
    assert reader(tmp_path / "a").fill("t", found, whole_of(tensor))
    assert reader(tmp_path / "a").fill("one", one, ShardRange((), (), ()))
    assert torch.equal(found.view(torch.uint8), bits)
    assert one == 3.5


def test_other_readers_of_the_format_open_it(tmp_path: Path) -> None:
    """Read by the format's own definition: a length, a JSON header, bytes at offsets from its end."""
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    save(tmp_path / "a", *(ShardSpec(name, whole_of(t), t) for name, t in tensors.items()))
    content = (tmp_path / "a").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values())
    assert header["b"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert header["a"] == {"dtype": "U8", "shape": [3], "data_offsets": [24, 27]}
    assert data == tensors["b"].numpy().tobytes() + b"\1\2\3"
    assert (8 + length) % 8 == 0


def test_boxes_of_one_cut_are_filled_from_boxes_of_another(tmp_path: Path) -> None:
    tensor = torch.arange(10 * 6).view(10, 6)
    cuts = [(slice(0, 4), slice(0, 6)), (slice(4, 10), slice(0, 2)), (slice(4, 10), slice(2, 6))]
    paths = [tmp_path / str(number) for number in range(3)]
    for path, cut in zip(paths, cuts, strict=True):
        save(path, piece("t", tensor, *cut))
    for rows in (slice(0, 10), slice(3, 5), slice(9, 10)):
        for columns in (slice(0, 6), slice(1, 3), slice(5, 6)):
            wanted = tensor[rows, columns]
            found = torch.zeros_like(wanted)
            reader(*paths).fill("t", found, ShardRange((10, 6), (rows.start, columns.start), tuple(wanted.shape)))
            assert torch.equal(found, wanted)


def test_a_piece_that_is_there_twice_is_one(tmp_path: Path) -> None:
    tensor = torch.arange(12).view(4, 3)
    for number, rows in enumerate((slice(0, 2), slice(0, 2), slice(2, 4))):
        save(tmp_path / str(number), piece("t", tensor, rows, slice(0, 3)))
    found = torch.zeros_like(tensor)
    assert reader(*(tmp_path / str(number) for number in range(3))).fill("t", found, whole_of(tensor))
    assert torch.equal(found, tensor)


def test_files_are_opened_when_they_are_needed(tmp_path: Path) -> None:
    tensor = torch.arange(12).view(4, 3)
    save(tmp_path / "mine", piece("t", tensor, slice(0, 2), slice(0, 3)))
    files = reader(tmp_path / "mine", tmp_path / "absent")
    mine = torch.zeros(2, 3, dtype=torch.int64)
    assert files.fill("t", mine, ShardRange((4, 3), (0, 0), (2, 3)))
    with pytest.raises(CheckpointCorrupt, match="absent cannot be read: No such file"):
        files.fill("t", mine, ShardRange((4, 3), (1, 0), (2, 3)))


def test_what_is_not_there_or_not_all_there_is_told(tmp_path: Path) -> None:
    tensor = torch.arange(12).view(4, 3)
    save(tmp_path / "a", piece("t", tensor, slice(0, 2), slice(0, 3)))
    assert not reader(tmp_path / "a").fill("other", torch.zeros(1), ShardRange((1,), (0,), (1,)))
    with pytest.raises(CheckpointCorrupt, match="lacks 6 of the 12 numbers wanted of t"):
        reader(tmp_path / "a").fill("t", torch.zeros_like(tensor), whole_of(tensor))
    with pytest.raises(UserError, match=r"t is torch.int64 of shape \(4, 3\), but torch.float32 of \(4, 3\) is wanted"):
        reader(tmp_path / "a").fill("t", tensor.float(), whole_of(tensor))
    with pytest.raises(UserError, match=r"of shape \(4, 3\), but torch.int64 of \(3, 4\) is wanted"):
        reader(tmp_path / "a").fill("t", tensor.view(3, 4), whole_of(tensor.view(3, 4)))


def test_a_sum_knows_every_bit(tmp_path: Path) -> None:
    tensor = torch.arange(100.0)
    path = tmp_path / "a"
    total = save(path, ShardSpec("t", whole_of(tensor), tensor), generators={"torch": "00"})
    check(path, total, content=True)
    content = path.read_bytes()
    assert total.size == len(content)
    for place in (0, 9, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        check(path, total, content=False)
        with pytest.raises(CheckpointCorrupt, match="a is damaged: its content is not what was written"):
            check(path, total, content=True)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointCorrupt, match=f"a has {len(content) - 1:,} bytes of {len(content):,}"):
        check(path, total, content=False)
    path.unlink()
    with pytest.raises(CheckpointCorrupt, match="a cannot be read: No such file or directory"):
        check(path, total, content=False)


def file_with(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


META = {"places": json.dumps({"t": [[2], [0]]})}
GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2**64 - 1),
        file_with(b"[" * 100_000),
        file_with(b"\xff\xfe{}"),
        file_with([]),
        file_with({}),
        file_with({"__metadata__": {}}),
        file_with({"__metadata__": {"places": "{"}}),
        file_with({"__metadata__": META, "t": {**GOOD, "dtype": "object"}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "data_offsets": [8, 16]}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "data_offsets": [-8, 0]}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "data_offsets": [0, 4]}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "shape": [4]}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "shape": [2, 1]}}, bytes(8)),
        file_with({"__metadata__": META, "t": {**GOOD, "shape": ["2"]}}, bytes(8)),
        file_with({"__metadata__": META, "u": GOOD}, bytes(8)),
        file_with({"__metadata__": {"places": json.dumps({"t": [[2], [1]]})}, "t": GOOD}, bytes(8)),
        file_with({"__metadata__": {"places": json.dumps({"t": [[2], [-1]]})}, "t": GOOD}, bytes(8)),
        file_with({"__metadata__": {"places": json.dumps({"t": [2]})}, "t": GOOD}, bytes(8)),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"a is not a file of a checkpoint"):
        read_header(tmp_path / "a")


def test_the_header_that_the_hostile_ones_were_made_from_is_sound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(file_with({"__metadata__": META, "t": GOOD}, bytes(8)))
    assert list(read_header(tmp_path / "a").entries) == ["t"]


class Grudging(io.RawIOBase):
    """A stream that takes some bytes at a time, as a raw file may."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, part: Any) -> int:
        self.content += bytes(part[:1000])
        return min(len(part), 1000)


def test_all_is_written_to_a_stream_that_takes_little(tmp_path: Path) -> None:
    tensor = torch.arange(5000.0)
    stream = Grudging()
    total = write(stream, [ShardSpec("t", whole_of(tensor), tensor)], {})  # type: ignore[arg-type]
    (tmp_path / "a").write_bytes(stream.content)
    check(tmp_path / "a", total, content=True)
