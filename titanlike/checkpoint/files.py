"""Files of a checkpoint, on a local disk or a remote file system, of which any range of bytes can be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.utils.regular_file import check_regular

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


class RemoteFile:
    """A file on a file system of fsspec. Only the ranges that are read are transferred."""

    def __init__(self, files: Any, path: str, name: str) -> None:
        self.files = files
        self.path = path
        self.name = name

    def __str__(self) -> str:
        return self.name

    def size(self) -> int:
        with self._available():
            return int(self.files.size(self.path))

    def read(self, start: int, size: int) -> Bytes:
        with self._available():
            content = self.files.cat_file(self.path, start=start, end=start + size)
        return np.frombuffer(bytearray(content), np.uint8)  # torch takes writable memory only

    def download(self, path: Path) -> None:
        """Copies the whole file to a local path."""
        with self._available():
            self.files.get_file(self.path, str(path))

    @contextmanager
    def _available(self) -> Iterator[None]:
        """Raises `UserError` if the file may exist, but cannot be read now: it must not be taken for corrupt."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # noqa: BLE001  each file system has its own errors
            raise UserError(f"{self.name} cannot be downloaded: {error!r}") from None


def content_of(file: File) -> bytes:
    """Returns the whole content of a small file."""
    return file.read(0, file.size()).tobytes()
