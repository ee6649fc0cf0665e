"""Files of a checkpoint, on a local disk or a remote file system, of which any range of bytes can be read."""

import re
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

STEP = re.compile(r"step-(\d{8,})")
FILE = re.compile(r"rank-\d{5,}\.safetensors|state\.json")
MANIFEST = "manifest.json"
STATE = "state.json"


def name_of(step: int) -> str:
    """Returns the directory name of a step."""
    return f"step-{step:08d}"


def file_of(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class ReadableFile(Protocol):
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
        return self.path.stat().st_size

    def read(self, start: int, size: int) -> Bytes:
        return np.fromfile(self.path, np.uint8, size, offset=start)


def content_of(file: ReadableFile) -> bytes:
    """Returns the whole content of a small file."""
    return file.read(0, file.size()).tobytes()
