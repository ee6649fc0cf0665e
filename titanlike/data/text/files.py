"""Files wherever they are: here, or at an address that fsspec knows, such as `s3://`, `https://` or `hf://`. No torch."""

import glob
import gzip
import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from titanlike.config import UserError

T = TypeVar("T")

TRIES, PAUSE = 3, 1.0  # of what is far away, and seconds between them
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")  # {00000..01023}, for places that cannot list what they have
NOT_TEXT = b"\0"
SILENCE = 60.0  # seconds without a byte, after which a web server counts as gone
BLOCK = 2**20  # bytes of a compressed file, or of one far away, that are asked for at once


@dataclass(frozen=True)
class File:
    """A file by its path or address, and its size in bytes."""

    name: str
    size: int
    version: str = field(default="", compare=False)
    """Another after its content has changed: a time, or what the place gives for one; empty where it gives nothing."""

    @property
    def kind(self) -> str:
        """The end of its name, without that of a compression."""
        return Path(re.sub(r"\.(gz|zst)$", "", self.name)).suffix

    @property
    def compressed(self) -> bool:
        """Whether it has to be read from its start."""
        return self.name.endswith((".gz", ".zst"))


def is_address(place: str) -> bool:
    """Whether a place is reached through fsspec."""
    return "://" in place


def list_files(place: str, key: str = "data.path") -> list[File]:
    """The file, all files below the folder, or the files that the pattern fits, in order of their names. Below a folder hidden
    ones are left out, and those that are no text. `key` is what the user wrote the place at."""
    found = _list_remote(place) if is_address(place) else _list_local(place)
    if not found:
        raise UserError(f"{key} = {place!r}: there is no file to read")
    return found


def open_file(file: File) -> BinaryIO:
    """A file's content from its start, decompressed if its name ends in .gz or .zst. A far place that fails is asked again."""
    zstandard = needed("zstandard", file.name) if file.name.endswith(".zst") else None
    if is_address(file.name):
        fs, path = _file_system(file.name)
        try:
            raw = retry(lambda: fs.open(path, "rb"), file.name)
        except FileNotFoundError:
            raise UserError(f"{file.name}: there is no such file any more") from None
        raw = cast(BinaryIO, io.BufferedReader(_Patient(raw, file), BLOCK))
    else:
        try:
            raw = Path(file.name).open("rb")  # noqa: SIM115  who calls closes it
        except OSError as error:
            raise UserError(f"{file.name}: cannot be read: {error.strerror}") from None
    if file.name.endswith(".gz"):
        return cast(BinaryIO, Decompressed(gzip.GzipFile(fileobj=raw), raw))
    if zstandard:
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
        return cast(BinaryIO, Decompressed(reader, raw))
    return cast(BinaryIO, raw)


class Decompressed(io.BufferedReader):
    """What a compressed file holds. In blocks: a reader of zstandard has no lines of its own."""

    def __init__(self, reader: Any, compressed: BinaryIO) -> None:
        super().__init__(reader, BLOCK)
        self.compressed = compressed

    def close(self) -> None:
        """Close both: gzip leaves open what it was given."""
        super().close()
        self.compressed.close()


class _Patient(io.RawIOBase):
    """A file at an address. Read in blocks: fsspec's own lines are slow."""

    def __init__(self, raw: Any, file: File) -> None:
        self.raw, self.file = raw, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self.raw.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self.raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self.raw.tell())

    def readinto(self, buffer: Any) -> int:
        content = retry(lambda: self.raw.read(len(buffer)), self.file.name)
        if not content and self.tell() < self.file.size:
            raise UserError(f"{self.file.name}: ends at byte {self.tell()} of {self.file.size}; it has changed")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self.raw.close()
        super().close()


class Folder(Protocol):
    """A folder of files that are read in any order."""

    local: bool

    def path(self, name: str) -> Path:
        """The file, on this machine."""

    def read(self, name: str) -> bytes:
        """All of a file."""

    def sizes(self) -> Mapping[str, int] | None:
        """Bytes of each file; None where the place cannot list them."""

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Bytes of files, each from a first to before a last one."""


def open_folder(place: str) -> Folder:
    """The folder at a path or an address."""
    return _Remote(place) if is_address(place) else _Local(place)


class _Local:
    local = True

    def __init__(self, place: str) -> None:
        self.place = Path(place)

    def path(self, name: str) -> Path:
        return self.place / name

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.place.iterdir() if path.is_file()}

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        raise AssertionError("mapped into memory instead")


class _Remote:
    local = False

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self.fs, self.root = _file_system(self.place)

    def path(self, name: str) -> Path:
        raise AssertionError("not on this machine")

    def read(self, name: str) -> bytes:
        return retry(lambda: self.fs.cat_file(f"{self.root}/{name}"), f"{self.place}/{name}")

    def sizes(self) -> dict[str, int] | None:
        try:
            entries = self.fs.ls(self.root, detail=True)
        except Exception:  # noqa: BLE001  whatever a place without lists may raise; too short a range is told when it is read
            return None
        if any(entry.get("size") is None for entry in entries):
            return None
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries}

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        paths = [f"{self.root}/{name}" for name, _, _ in wanted]
        starts, stops = ([item[place] for item in wanted] for place in (1, 2))
        try:
            found = retry(
                lambda: self.fs.cat_ranges(paths, starts, stops, on_error="raise"), f"{self.place}/{wanted[0][0]}"
            )
        except FileNotFoundError as error:
            raise UserError(f"{self.place}: a file of it is not there any more: {error}") from None
        for (name, start, stop), content in zip(wanted, found, strict=True):
            if len(content) != stop - start:
                raise UserError(
                    f"{self.place}/{name} ends at byte {start + len(content)}, before byte {stop}; copy it again"
                )
        return found


def retry(do: Callable[[], T], name: str) -> T:
    """Do it, again after a while if it fails. What is not there is not asked for again."""
    for attempt in range(1, TRIES + 1):
        try:
            return do()
        except FileNotFoundError:
            raise
        except Exception as error:  # noqa: BLE001  each file system has errors of its own
            if attempt == TRIES:
                raise UserError(f"{name}: cannot be read, tried {TRIES} times: {_words(error)}") from None
            time.sleep(PAUSE * attempt)
    raise AssertionError


def needed(module: str, name: str) -> Any:
    """A library that only some files want."""
    try:
        return __import__(module)
    except ImportError:
        raise UserError(f"{name} wants {module}: pip install 'titanlike[data]'") from None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _file_system(place: str) -> tuple[Any, str]:
    import fsspec  # type: ignore[import-untyped]  # only here: most recipes do without

    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(place, **_options(place)))
    except (ImportError, ValueError) as error:
        raise UserError(f"{place}: {error}") from None


def _options(place: str) -> dict[str, Any]:
    """For the web: a large file may take hours, as long as something comes; an answer that does not come is not waited for."""
    if not place.startswith(("http://", "https://")):
        return {}
    timeout = needed("aiohttp", place).ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
    return {"client_kwargs": {"timeout": timeout}}


def _list_remote(place: str) -> list[File]:
    if match := BRACES.search(place):
        first, last = match.groups()
        numbers = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        return [
            file for number in numbers for file in _list_remote(place[: match.start()] + number + place[match.end() :])
        ]
    fs, path = _file_system(place)

    def entries() -> dict[str, Any]:
        if any(sign in path for sign in "*?["):
            return cast(dict[str, Any], fs.glob(path, detail=True))
        info = fs.info(path)  # not isdir: of the web that fetches the whole file, to look for links in it
        if info["type"] == "directory" or place.endswith("/"):
            return cast(dict[str, Any], fs.find(path, detail=True))
        return {path: info}

    try:
        found = retry(entries, place)
    except FileNotFoundError:
        raise UserError(f"{place}: there is no such file") from None
    files = [
        File(fs.unstrip_protocol(name), info.get("size") or 0, _version(info))
        for name, info in found.items()
        if info["type"] == "file"
    ]
    return sorted(files, key=lambda file: file.name)


def _list_local(place: str) -> list[File]:
    found = []
    for match in [place] if Path(place).exists() else sorted(glob.glob(place, recursive=True)):
        path = Path(match)
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if not _hidden(file, path))
            found += [file for file in below if (file.is_file() or not file.exists()) and _is_text(file)]
        else:
            found.append(path)
    return [local_file(path) for path in found]


def local_file(path: Path) -> File:
    """A file of this machine."""
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return File(str(path), found.st_size, str(found.st_mtime_ns))


def _version(info: Mapping[str, Any]) -> str:
    """What each file system calls it."""
    names = ("ETag", "etag", "LastModified", "last_modified", "last_commit", "mtime", "modified", "updated", "created")
    return next((str(info[name]) for name in names if info.get(name)), "")


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _is_text(path: Path) -> bool:
    """Whether it is, or has, text: what is neither, such as a picture, has a zero byte soon."""
    if path.suffix in (".gz", ".zst", ".parquet"):
        return True
    with suppress(OSError), path.open("rb") as file:
        return NOT_TEXT not in file.read(8192)
    return True  # who reads it says why it cannot be read
