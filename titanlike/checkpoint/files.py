"""Files of a checkpoint, on a local disk or a remote file system, of which any range of bytes can be read."""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from titanlike.utils.files import check_regular

Bytes = npt.NDArray[np.uint8]


class File(Protocol):
    """A file that can be read. `str(file)` is its name in messages."""

    def size(self) -> int:
        """Returns the number of bytes."""
        ...

    def read(self, start: int, size: int) -> Bytes:
        """Returns `size` bytes from `start`; less at the end of the file."""
        ...


class LocalFile:
    """A file on a local disk."""

    def __init__(self, path: Path, name: str = "") -> None:
        """`name` is the name in messages, if the file is a copy of a remote one."""
        self.path = path
        self.name = name or str(path)

    def __str__(self) -> str:
        return self.name

    def size(self) -> int:
        check_regular(self.path)
        return self.path.stat().st_size

    def read(self, start: int, size: int) -> Bytes:
        return np.fromfile(self.path, np.uint8, size, offset=start)


def content_of(file: File) -> bytes:
    """Returns the whole content of a small file."""
    return file.read(0, file.size()).tobytes()
