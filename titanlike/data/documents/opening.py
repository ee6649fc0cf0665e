"""Opens local files, and files at any URL that fsspec supports, such as `s3://`, `https://` or `hf://`. No torch."""

import gzip
import io
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.data.documents.data_files import File, import_optional, is_address

BLOCK = 2**20  # bytes read at a time from a compressed or remote file


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
