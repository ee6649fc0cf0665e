"""Atomic writes: a reader sees the old file or the complete new one, even if the process is killed or the disk is full."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_writer(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Opens `path`.partial for unbuffered writing and renames it to `path` when the block ends without an error.

    With `durable`, the content reaches the disk before the rename. The rename itself is durable after `fsync_directory`. If the
    block raises, the partial file is deleted.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb", buffering=0) as file:
            yield file
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    """Writes all of `content` to an unbuffered file, which may accept less than it is given."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def atomic_write_text(path: Path, text: str | bytes, *, durable: bool = True) -> None:
    """Replaces the content of a file with `text`, which may be encoded, atomically."""
    with atomic_writer(path, durable=durable) as file:
        write_all(file, text if isinstance(text, bytes) else text.encode())


def fsync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
