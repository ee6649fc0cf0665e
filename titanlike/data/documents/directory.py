"""Directories of data files, local or at any URL that fsspec supports, read by byte range. No torch."""

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.data.documents.data_files import is_address


class DataDirectory:
    """A local or remote directory, whose files are read in byte ranges."""

    MAX_OPEN = 512  # local files that stay open

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")
        self.local = not is_address(location)
        self._fs: Any
        self._fs, self._root = None, location
        if not self.local:
            from titanlike.data.documents.remote import file_system, retry  # only remote files need it

            self._retry = retry
            self._fs, self._root = file_system(self.location)
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close_all, self._descriptors)

    def path(self, name: str) -> Path:
        """Returns the path of a local file."""
        assert self.local
        return Path(self._root, name)

    def read(self, name: str) -> bytes:
        """Reads a complete file."""
        if self.local:
            return self.path(name).read_bytes()
        return self._retry(lambda: self._fs.cat_file(f"{self._root}/{name}"), f"{self.location}/{name}")

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
        """Reads byte ranges, of remote files concurrently; a range is a file name, a start and an exclusive end."""
        if not wanted:
            return []
        contents = self._read_local(wanted) if self.local else self._read_remote(wanted)
        for (name, start, stop), content in zip(wanted, contents, strict=True):
            end = start + len(content)
            if end != stop:
                raise UserError(f"{self.location}/{name} ends at byte {end}, before byte {stop}; copy it again")
        return contents

    def _read_local(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        contents = []
        for name, start, stop in wanted:
            try:
                descriptor = self._descriptors.get(name)
                if descriptor is not None:
                    contents.append(os.pread(descriptor, stop - start, start))
                    continue
                descriptor = os.open(self.path(name), os.O_RDONLY)
                try:
                    contents.append(os.pread(descriptor, stop - start, start))
                finally:
                    # Another thread may have opened the file in the meantime.
                    if (
                        len(self._descriptors) >= self.MAX_OPEN
                        or self._descriptors.setdefault(name, descriptor) != descriptor
                    ):
                        os.close(descriptor)
            except OSError as error:
                raise UserError(f"{self.location}/{name}: cannot be read: {error.strerror}") from None
        return contents

    def _read_remote(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        names, starts, stops = (list(values) for values in zip(*wanted, strict=True))
        paths = [f"{self._root}/{name}" for name in names]
        read = partial(self._fs.cat_ranges, paths, starts, stops, on_error="raise")
        try:
            contents: list[bytes] = self._retry(read, f"{self.location}/{names[0]}")
        except FileNotFoundError as error:
            raise UserError(f"{self.location}: a file no longer exists: {error}") from None
        return contents


def _close_all(descriptors: Mapping[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
