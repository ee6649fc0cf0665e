"""Files at any URL that fsspec supports, such as `s3://`, `https://` or `hf://`. No torch."""

import base64
import netrc
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec  # type: ignore[import-untyped]

from titanlike.config import UserError
from titanlike.config.base import refuse_credentials
from titanlike.data.documents.data_files import File, import_optional

T = TypeVar("T")

TRIES, RETRY_DELAY = 3, 1.0  # attempts to read a remote file, and seconds between them
NUMBER_RANGE = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")  # {00000..01023}: web servers cannot list their files
MAX_RANGE = 100_000  # files, each of which is looked up
HTTP_TIMEOUT = 60.0  # seconds without a byte


def list_remote(url: str) -> list[File]:
    """Lists the file, all files below the folder, or the files that match the pattern or the range of numbers."""
    if match := NUMBER_RANGE.search(url):
        first, last = match.groups()
        if int(last) - int(first) >= MAX_RANGE:
            raise UserError(f"{url}: a range of {int(last) - int(first) + 1:,} files; give at most {MAX_RANGE:,}")
        numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        return [file for number in numbers for file in list_remote(url[: match.start()] + number + url[match.end() :])]
    fs, path = file_system(url)

    def entries() -> dict[str, Any]:
        if any(character in path for character in "*?["):
            return dict(fs.glob(path, detail=True))
        info = fs.info(path)  # not isdir, which downloads a file from a web server to search it for links
        if info["type"] == "directory" or url.endswith("/"):
            found = fs.find(path, detail=True)
            root = path.rstrip("/")
            return {name: info for name, info in found.items() if "/." not in name.removeprefix(root)}
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


def open_remote(file: File) -> Any:
    """Opens a file. Reads are retried."""
    fs, path = file_system(file.name)
    try:
        return _RemoteReader(retry(lambda: fs.open(path, "rb"), file.name), file)
    except FileNotFoundError:
        raise UserError(f"{file.name}: no longer exists") from None


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


def file_system(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path on it."""
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


def _version(info: Mapping[str, Any]) -> str:
    names = ("ETag", "etag", "LastModified", "last_modified", "last_commit", "mtime", "modified", "updated", "created")
    return next((str(info[name]) for name in names if info.get(name)), "")
