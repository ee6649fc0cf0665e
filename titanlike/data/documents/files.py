"""Local files, and files at any URL that fsspec supports, such as `s3://`, `https://` or `hf://`. No torch."""

import base64
import glob
import gzip
import hashlib
import io
import json
import netrc
import os
import re
import stat
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from titanlike.config import UserError
from titanlike.config.credentials import refuse_credentials
from titanlike.utils.live_line import DISK_FULL

T = TypeVar("T")

TRIES, RETRY_DELAY = 3, 1.0  # attempts to read a remote file, and seconds between them
NUMBER_RANGE = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")  # {00000..01023}: web servers cannot list their files
MAX_RANGE = 100_000  # files, each of which is looked up
HTTP_TIMEOUT = 60.0  # seconds without a byte
BLOCK = 2**20  # bytes read at a time from a compressed or remote file


@dataclass(frozen=True)
class File:
    """Path or URL of a file, and its size in bytes."""

    name: str
    size: int
    version: str = field(default="", compare=False)
    """Differs after a change of the content: a modification time or an ETag. Empty if the file system has neither."""

    @property
    def kind(self) -> str:
        """Suffix of the name, without that of a compression."""
        return Path(re.sub(r"\.(gz|zst)$", "", self.name)).suffix

    @property
    def compressed(self) -> bool:
        """Whether reading has to begin at the start of the file."""
        return self.name.endswith((".gz", ".zst"))


def is_address(path: str) -> bool:
    """Whether `path` is a URL, accessed through fsspec."""
    return "://" in path


def list_inputs(inputs: Sequence[str | File]) -> list[File]:
    """Lists the files of a command's INPUT arguments."""
    return [file for item in inputs for file in ([item] if isinstance(item, File) else list_files(item, "INPUT"))]


def list_files(path: str, key: str = "data.path") -> list[File]:
    """Lists the file, all files below the folder, or the files that match the pattern, sorted by name.

    Of a local folder, hidden files and binary files are left out. `key` names the option in error messages.
    """
    files = _list_remote(path) if is_address(path) else _list_local(path)
    if not files:
        raise UserError(f"{key} = {path!r}: no files found")
    return files


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
    zstandard = import_optional("zstandard", file.name) if file.name.endswith(".zst") else None
    raw: io.BufferedReader
    if is_address(file.name):
        fs, path = file_system(file.name)
        try:
            remote: Any = _RemoteReader(retry(lambda: fs.open(path, "rb"), file.name), file)
        except FileNotFoundError:
            raise UserError(f"{file.name}: no longer exists") from None
        raw = io.BufferedReader(remote, BLOCK)
    else:
        try:
            raw = Path(file.name).open("rb")  # noqa: SIM115  the caller closes it
        except OSError as error:
            raise UserError(f"{file.name}: cannot be read: {error.strerror}") from None
    if file.name.endswith(".gz"):
        return Decompressed(gzip.GzipFile(fileobj=raw), raw)
    if zstandard:
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
        return Decompressed(reader, raw)
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


class _RemoteReader:
    """An fsspec file with retries and a check of the size. Wrapped in a BufferedReader, since fsspec's `readline` is slow."""

    def __init__(self, raw: Any, file: File) -> None:
        self._raw, self._file = raw, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def read(self, size: int = -1) -> bytes:
        content: bytes = retry(lambda: self._raw.read(size), self._file.name)
        if not content and self._raw.tell() < self._file.size:
            raise UserError(f"{self._file.name}: ends at byte {self._raw.tell()} of {self._file.size}; it has changed")
        return content

    def readinto(self, buffer: memoryview) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def retry(read: Callable[[], T], name: str) -> T:
    """Calls `read`, up to `TRIES` times if it fails. A missing file is not retried."""
    for attempt in range(1, TRIES + 1):
        try:
            return read()
        except Exception as error:
            cause = error.__cause__ or error
            # fsspec reports a server that does not answer as a missing file, with the connection's error as the cause.
            if isinstance(error, FileNotFoundError) and (
                isinstance(cause, FileNotFoundError) or not isinstance(cause, OSError)
            ):
                raise
            reason = f"{type(cause).__name__}: {cause}".removesuffix(": ")
        if attempt < TRIES:
            time.sleep(RETRY_DELAY * attempt)
    raise UserError(f"{name}: cannot be read, tried {TRIES} times: {reason}")


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


def file_system(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path on it."""
    import fsspec  # type: ignore[import-untyped]  # imported late: only remote files need it

    refuse_credentials("address", url)
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        # No limit on the total: a large file may take hours, as long as data arrives.
        limits = {"total": None, "sock_connect": HTTP_TIMEOUT, "sock_read": HTTP_TIMEOUT}
        aiohttp = import_optional("aiohttp", url)
        options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(**limits)}}
        with suppress(OSError, netrc.NetrcParseError):
            if login := netrc.netrc().authenticators(urlsplit(url).hostname or ""):
                token = base64.b64encode(f"{login[0]}:{login[2]}".encode()).decode()
                options["client_kwargs"]["headers"] = {"Authorization": f"Basic {token}"}
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    return fs, path


def _list_remote(url: str) -> list[File]:
    if match := NUMBER_RANGE.search(url):
        first, last = match.groups()
        if int(last) - int(first) >= MAX_RANGE:
            raise UserError(f"{url}: a range of {int(last) - int(first) + 1:,} files; give at most {MAX_RANGE:,}")
        numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        return [file for number in numbers for file in _list_remote(url[: match.start()] + number + url[match.end() :])]
    fs, path = file_system(url)

    def entries() -> dict[str, Any]:
        if any(character in path for character in "*?["):
            return dict(fs.glob(path, detail=True))
        info = fs.info(path)  # not isdir, which downloads a file from a web server to search it for links
        if info["type"] == "directory" or url.endswith("/"):
            return dict(fs.find(path, detail=True))
        return {path: info}

    try:
        found = retry(entries, url)
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    files = [
        File(fs.unstrip_protocol(name), info.get("size") or 0, _version(info))
        for name, info in found.items()
        if info["type"] == "file"
    ]
    return sorted(files, key=lambda file: file.name)


def _list_local(pattern: str) -> list[File]:
    paths = []
    for match in [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True)):
        root = Path(match)
        if not root.is_dir():
            paths.append(root)
            continue
        for path in sorted(root.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            # A broken link is listed, so that opening it reports an error.
            if not hidden and (path.is_file() or not path.exists()) and _is_text(path):
                paths.append(path)
    return [local_file(path) for path in paths]


def local_file(path: Path) -> File:
    """Returns the `File` of a local path."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: cannot be read: not a regular file")
    return File(str(path), status.st_size, str(status.st_mtime_ns))


def _version(info: Mapping[str, Any]) -> str:
    names = ("ETag", "etag", "LastModified", "last_modified", "last_commit", "mtime", "modified", "updated", "created")
    return next((str(info[name]) for name in names if info.get(name)), "")


def _is_text(path: Path) -> bool:
    """Whether a file is, or contains, text: binary files, such as images, have a zero byte near their start."""
    if path.suffix in (".gz", ".zst", ".parquet"):
        return True
    with suppress(OSError), path.open("rb") as file:
        return b"\0" not in file.read(8192)
    return True  # opening it later reports why it cannot be read


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
