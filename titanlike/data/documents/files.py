"""Local files, and files at any URL that fsspec supports, such as `s3://`, `https://` or `hf://`. No torch."""

import gzip
import hashlib
import io
import json
import os
import re
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from titanlike.config import UserError
from titanlike.utils.live_line import DISK_FULL

T = TypeVar("T")

BLOCK = 2**20  # bytes read at a time from a compressed or remote file
DATASET_DICT, *DATASET_FILES = "dataset_dict.json", "dataset_info.json", "state.json"  # of `datasets.save_to_disk`
CACHED_BY_DATASETS = re.compile(r"cache-[0-9a-f]+(_[0-9]+_of_[0-9]+)?\.arrow$")  # results of `map`, beside the data


@dataclass(frozen=True)
class File:
    """Path or URL of a file, and its size in bytes."""

    name: str
    size: int
    version: str = field(default="", compare=False)
    """Differs after a change of the content: a modification time or an ETag. Empty if the file system has neither."""

    @property
    def kind(self) -> str:
        """Suffix of the name in lower case, without that of a compression."""
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


def list_files(path: str, key: str = "data.path") -> list[File]:
    """Lists the file, all files below the folder, or the files that match the pattern, sorted by name. Of a folder, hidden files
    are left out, and of a local one binary files too. `key` names the option in error messages."""
    if is_address(path):
        from titanlike.data.documents.remote import list_remote  # only remote files need it

        files = list_remote(path)
    else:
        from titanlike.data.documents.local import list_local  # the default data need neither

        files = list_local(path)
    if not files:
        raise UserError(f"{key} = {path!r}: no files found")
    return _data_files(files)


def _data_files(files: Sequence[File]) -> list[File]:
    """Leaves out what `datasets.save_to_disk` writes beside the data of a dataset, and what `datasets` caches there. Refuses a
    folder of several splits."""
    named = [(file.name.rpartition("/")[0], file.name.rpartition("/")[2]) for file in files]
    folders = {folder for folder, name in named if name.endswith(".arrow") and not CACHED_BY_DATASETS.match(name)}
    for parent in (folder for folder, name in named if name == DATASET_DICT):
        splits = sorted(folder.rpartition("/")[2] for folder in folders if folder.rpartition("/")[0] == parent)
        if len(splits) > 1:
            example = f"{parent}/{'train' if 'train' in splits else splits[0]}"
            raise UserError(f"{parent} has the splits {', '.join(splits)} of a dataset; give one of them: {example}")
    return [
        file
        for file, (folder, name) in zip(files, named, strict=True)
        if not (folder in folders and (name in DATASET_FILES or CACHED_BY_DATASETS.match(name)))
        and not (folders and name == DATASET_DICT)
    ]


def stdlib_files() -> list[File]:
    """Lists the source files of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]  # site-packages may have 100,000 files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [local_file(path) for path in sorted(paths)]


def open_file(file: File) -> io.BufferedReader:
    """Opens a file for reading. Decompresses `.gz` and `.zst`; retries the reads of remote files."""
    zstandard = import_optional("zstandard", file.name) if file.path.endswith(".zst") else None
    raw: io.BufferedReader
    if is_address(file.name):
        from titanlike.data.documents.remote import open_remote

        raw = io.BufferedReader(open_remote(file), BLOCK)
    else:
        try:
            raw = Path(file.name).open("rb")  # noqa: SIM115  the caller closes it
        except OSError as error:
            raise UserError(f"{file.name}: cannot be read: {error.strerror}") from None
    if file.path.endswith(".gz"):
        return Decompressed(gzip.GzipFile(fileobj=raw), raw)
    if zstandard:
        from titanlike.data.documents.zstandard_reader import ZstandardReader

        return Decompressed(ZstandardReader(zstandard.ZstdDecompressor(), raw), raw)
    return raw


class Decompressed(io.BufferedReader):
    """Content of a compressed file. Buffered, because a zstandard reader cannot read lines."""

    def __init__(self, reader: Any, compressed: io.BufferedReader) -> None:
        super().__init__(reader, BLOCK)
        self.compressed = compressed

    def close(self) -> None:
        """Closes the compressed file too, which gzip leaves open."""
        super().close()
        self.compressed.close()


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
