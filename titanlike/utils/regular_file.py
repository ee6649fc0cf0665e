"""Reading of files that may have been replaced: opening a named pipe would wait for a writer, perhaps for ever."""

import errno
from pathlib import Path


def check_regular(path: Path) -> None:
    """Raises `OSError` if the path is neither a regular file nor a link to one."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    path.stat()  # raises FileNotFoundError, or the error that made `exists` return False


def read_regular(path: Path) -> bytes:
    """Returns the content of a regular file, and raises `OSError` for anything else."""
    check_regular(path)
    return path.read_bytes()
