"""Checkpoints on a file system that fsspec supports, such as S3."""

import glob
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.checkpoint.files import MANIFEST, STEP, Bytes, LocalFile, ReadableFile, name_of
from titanlike.config import UserError


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


class RemoteStore:
    """Checkpoints on a file system that fsspec supports, such as s3://bucket/runs. It has the methods of `LocalStore`."""

    num_readers = 16  # each range is a request, which takes some 50 ms however small it is

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]  # slow to import, and unused by most runs

        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"checkpoint.dir = {url!r}: {error}") from None
        self.url = url.rstrip("/")
        self._downloads = Path(tempfile.mkdtemp(prefix="titanlike-"))
        weakref.finalize(self, shutil.rmtree, self._downloads, ignore_errors=True)

    def __str__(self) -> str:
        return self.url

    def steps(self) -> list[int]:
        self.files.invalidate_cache()
        manifests = self.files.glob(f"{glob.escape(self.root)}/step-*/{MANIFEST}")
        return sorted(int(match[1]) for path in manifests if (match := STEP.fullmatch(path.split("/")[-2])))

    def read_file(self, name: str) -> bytes | None:
        self.files.invalidate_cache()
        try:
            content: bytes = self.files.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None
        return content

    def write_file(self, name: str, text: str) -> None:
        self.files.makedirs(self.root, exist_ok=True)
        self.files.pipe_file(f"{self.root}/{name}", text.encode())

    def begin(self, step: int, size: int) -> None:
        """Deletes what interrupted saves and deletions left, and an earlier checkpoint of the same step."""
        self.files.invalidate_cache()
        for directory in self.files.glob(f"{glob.escape(self.root)}/step-*"):
            names = {path.rpartition("/")[2] for path in self.files.ls(directory, detail=False)}
            if not names & {MANIFEST, f"{MANIFEST}.archived"}:
                self.files.rm(directory, recursive=True)
        self.remove(step)
        self.files.makedirs(self._path(step), exist_ok=True)

    def create(self, step: int, file: str) -> Any:
        return self.files.open(self._path(step, f"{MANIFEST}.partial" if file == MANIFEST else file), "wb")

    def publish(self, step: int) -> None:
        self.files.mv(self._path(step, f"{MANIFEST}.partial"), self._path(step, MANIFEST))

    def update_latest(self, step: int) -> None:
        self.write_file("latest", f"{name_of(step)}\n")

    def open(self, step: int, file: str, *, download: bool = False) -> ReadableFile:
        """Opens a file of a checkpoint for reading: a local copy if there is one, or if `download` requests it, else in place."""
        remote = RemoteFile(self.files, self._path(step, file), f"{self.url}/{name_of(step)}/{file}")
        local = self._downloads / name_of(step) / file
        if download and not local.exists():
            free, size = shutil.disk_usage(self._downloads).free, remote.size()
            if free < size:
                raise UserError(
                    f"{self._downloads.parent} has {free:,} bytes free, but {remote} takes {size:,}; set TMPDIR to a "
                    "directory with more space, or checkpoint.verify = 'size', which downloads no file"
                )
            local.parent.mkdir(exist_ok=True)
            remote.download(local.with_suffix(".partial"))
            local.with_suffix(".partial").rename(local)
        return LocalFile(local, str(remote)) if local.exists() else remote

    def delete_downloads(self) -> None:
        """Deletes the local copies of files, which take the space of this rank's share of a checkpoint."""
        for directory in self._downloads.iterdir():
            shutil.rmtree(directory)

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, the manifest first."""
        if self.files.exists(self._path(step, MANIFEST)):
            self.files.rm_file(self._path(step, MANIFEST))
        if self.files.exists(self._path(step)):
            self.files.rm(self._path(step), recursive=True)

    def archive(self, step: int) -> None:
        """Unpublishes a checkpoint by renaming its manifest, and moves it to where no later checkpoint of the step replaces it."""
        self.files.mv(self._path(step, MANIFEST), self._path(step, f"{MANIFEST}.archived"))
        archived = f"{self._path(step)}.archived"
        if self.files.exists(archived):
            self.files.rm(archived, recursive=True)
        self.files.makedirs(archived, exist_ok=True)
        self.files.invalidate_cache()
        for path in sorted(self.files.ls(self._path(step), detail=False), reverse=True):  # the manifest last
            self.files.cp_file(path, f"{archived}/{path.rpartition('/')[2].removesuffix('.archived')}")
        self.files.rm(self._path(step), recursive=True)

    def _path(self, step: int, file: str = "") -> str:
        return f"{self.root}/{name_of(step)}" + (f"/{file}" if file else "")
