"""Reads zstandard files. No torch."""

import io
from typing import Any


class ZstandardReader(io.RawIOBase):
    """Decompresses zstandard frames. The package's own reader takes the end of a truncated file for the end of the content."""

    def __init__(self, decompressor: Any, compressed: io.BufferedReader) -> None:
        self._decompressor, self._compressed = decompressor, compressed
        self._frame: Any = None  # None: the next byte begins a frame
        self._content = memoryview(b"")
        self._unread = b""  # of the next frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            # A few bytes can stand for 128 KiB. This many, for at most 128 MiB.
            block = self._unread or self._compressed.read(4096)
            if not block and self._frame:
                raise EOFError
            if not block:
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._content, self._unread = memoryview(self._frame.decompress(block)), b""
            if self._frame.eof:
                self._frame, self._unread = None, self._frame.unused_data
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size
