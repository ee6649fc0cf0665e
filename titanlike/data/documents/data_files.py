"""Names, sizes and versions of files, local or at a URL. No torch."""

import hashlib
import json
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from titanlike.config import UserError
from titanlike.utils.live_line import DISK_FULL

T = TypeVar("T")


@dataclass(frozen=True)
class File:
    """Path or URL of a file, and its size in bytes."""

    name: str
    size: int
    version: str = field(default="", compare=False)
    """Differs after a change of the content: a modification time or an ETag. Empty if the file system has neither."""

    @property
    def kind(self) -> str:
        """Suffix of the name in lower case, without the suffix of a compression."""
        return Path(re.sub(r"\.(gz|zst)$", "", self.path)).suffix.lower()

    @property
    def path(self) -> str:
        """The name without the query of a web address, such as `?download=true`."""
        return re.sub(r"[?#].*", "", self.name) if self.name.startswith(("http://", "https://")) else self.name

    @property
    def compressed(self) -> bool:
        """Whether reading has to begin at the start of the file."""
        return self.path.endswith((".gz", ".zst"))


def is_address(path: str) -> bool:
    """Whether `path` is a URL, accessed through fsspec."""
    return "://" in path


class DiskFull(UserError):
    """The disk has too little space. The caller knows which option or key chooses another one."""


@contextmanager
def convert_write_errors(folder: Path) -> Iterator[None]:
    """Converts an `OSError` in the block, which writes to `folder`, into a `UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFull(f"{folder}: the disk is full ({error.strerror})") from None
        raise UserError(f"{folder} cannot be written: {error}") from None


def import_optional(module: str, name: str) -> Any:
    """Imports an optional dependency, which the file `name` requires."""
    try:
        return __import__(module)
    except ImportError:
        raise UserError(f'{name} requires the package {module}; run: pip install "titanlike[data]"') from None


def local_file(path: Path) -> File:
    """Returns the `File` of a local path."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: cannot be read: not a regular file")
    return File(str(path), status.st_size, str(status.st_mtime_ns))


def hash_of(values: object) -> str:
    """Returns a fingerprint of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def versions_of(files: Sequence[File]) -> list[Any]:
    """Returns what differs after a change of the files on this machine."""
    return [[file.name, file.size, file.version] for file in files]


def fingerprint_of(files: Sequence[File]) -> str:
    """Identifies files by size and name below their common folder, so that the folder may move."""
    names = [file.name.split("/") for file in files]
    same = next((n for n, parts in enumerate(zip(*names, strict=False)) if len(set(parts)) > 1), len(names[0]) - 1)
    return hash_of([["/".join(name[same:]), file.size] for name, file in zip(names, files, strict=True)])
