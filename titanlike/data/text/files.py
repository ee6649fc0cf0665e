"""Local files, and files at any URL that fsspec supports, such as `s3://`, `https://` or `hf://`. No torch."""

import glob
import gzip
import io
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from titanlike.config import UserError
from titanlike.utils.live_line import DISK_FULL

T = TypeVar("T")

TRIES, RETRY_DELAY = 3, 1.0  # attempts to read a remote file, and seconds between them
NUMBER_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")  # {00000..01023}: web servers cannot list their files
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


def open_file(file: File) -> io.BufferedReader:
    """Opens a file for reading. Decompresses `.gz` and `.zst`; retries the reads of remote files."""
    zstandard = import_optional("zstandard", file.name) if file.name.endswith(".zst") else None
    raw: io.BufferedReader
    if is_address(file.name):
        fs, path = _file_system(file.name)
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


class DataDirectory:
    """A local or remote directory. Local files are memory-mapped by the caller; remote files are read in byte ranges."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")
        self.local = not is_address(location)
        self._fs: Any
        self._fs, self._root = (None, location) if self.local else _file_system(self.location)

    def path(self, name: str) -> Path:
        """Returns the path of a local file."""
        assert self.local
        return Path(self._root, name)

    def read(self, name: str) -> bytes:
        """Reads a complete file."""
        if self.local:
            return self.path(name).read_bytes()
        return retry(lambda: self._fs.cat_file(f"{self._root}/{name}"), f"{self.location}/{name}")

    def sizes(self) -> dict[str, int] | None:
        """Returns the size of each file in bytes, or None if the server cannot list the directory."""
        if self.local:
            return {path.name: path.stat().st_size for path in Path(self._root).iterdir() if path.is_file()}
        try:
            entries = self._fs.ls(self._root, detail=True)
        except Exception:  # noqa: BLE001  depends on the file system; a file that is too short is reported when it is read
            return None
        if any(entry.get("size") is None for entry in entries):
            return None
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries}

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Reads byte ranges of remote files concurrently; a range is a file name, a start and an exclusive end."""
        names, starts, stops = (list(values) for values in zip(*wanted, strict=True))
        paths = [f"{self._root}/{name}" for name in names]
        read = partial(self._fs.cat_ranges, paths, starts, stops, on_error="raise")
        try:
            contents: list[bytes] = retry(read, f"{self.location}/{names[0]}")
        except FileNotFoundError as error:
            raise UserError(f"{self.location}: a file no longer exists: {error}") from None
        for (name, start, stop), content in zip(wanted, contents, strict=True):
            end = start + len(content)
            if end != stop:
                raise UserError(f"{self.location}/{name} ends at byte {end}, before byte {stop}; copy it again")
        return contents


def retry(read: Callable[[], T], name: str) -> T:
    """Calls `read`, up to `TRIES` times if it fails. A missing file is not retried."""
    for attempt in range(1, TRIES + 1):
        try:
            return read()
        except FileNotFoundError:
            raise
        except Exception as error:  # noqa: BLE001  each file system has its own errors
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        if attempt < TRIES:
            time.sleep(RETRY_DELAY * attempt)
    raise UserError(f"{name}: cannot be read, tried {TRIES} times: {reason}")


@contextmanager
def convert_write_errors(folder: Path) -> Iterator[None]:
    """Converts an `OSError` in the block, which writes to `folder`, into a `UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise UserError(
                f"{folder}: the disk is full ({error.strerror}); free some space, then run the same command to resume"
            ) from None
        raise UserError(f"{folder} cannot be written: {error}") from None


def import_optional(module: str, name: str) -> Any:
    """Imports an optional dependency, which the file `name` requires."""
    try:
        return __import__(module)
    except ImportError:
        raise UserError(f"{name} requires the package {module}: pip install 'titanlike[data]'") from None


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec  # type: ignore[import-untyped]  # imported late: only remote files need it

    options = {}
    if url.startswith(("http://", "https://")):
        # No limit on the total: a large file may take hours, as long as data arrives.
        limits = {"total": None, "sock_connect": HTTP_TIMEOUT, "sock_read": HTTP_TIMEOUT}
        options = {"client_kwargs": {"timeout": import_optional("aiohttp", url).ClientTimeout(**limits)}}
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    return fs, path


def _list_remote(url: str) -> list[File]:
    if match := NUMBER_RANGE.search(url):
        first, last = match.groups()
        numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        return [file for number in numbers for file in _list_remote(url[: match.start()] + number + url[match.end() :])]
    fs, path = _file_system(url)

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
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return File(str(path), stat.st_size, str(stat.st_mtime_ns))


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
