"""Exclusive file locks that the operating system releases when their holder dies. Does not import torch."""

import errno
import fcntl
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # some network file systems, and Lustre without its option
HELD = (errno.EWOULDBLOCK, errno.EACCES)  # EACCES on network file systems


def is_locked(path: Path) -> bool:
    """Whether a process holds the `FileLock` at this path. Writes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # such as a metrics file without a run directory
        return False
    try:
        if not os.fstat(descriptor).st_size:
            return False  # released; to test the lock takes it for a moment, and a job that starts now would be refused
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in HELD
    finally:
        os.close(descriptor)
    return False


class LockHeld(Exception):
    """Raised if another process holds the lock. The message identifies that process."""


class FileLock:
    """A file that one process holds at a time.

    While the lock is held, the file identifies the holder. After `release` it is empty.

    Creates missing directories above the file. Raises `LockHeld` if another process holds the lock, and `OSError` if the file
    cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created_directories = [directory for directory in path.parents if not directory.exists()]
        self._descriptor: int | None = None
        self.is_supported = True
        """Whether the file system supports locks. If not, nothing excludes other processes."""
        # Another process may delete the file after we open it and before we lock it.
        while self._descriptor is None or not os.fstat(self._descriptor).st_nlink:
            self._close()
            self._acquire()
        # A forked child would keep the lock after our death. Executed programs do not inherit the descriptor.
        os.register_at_fork(after_in_child=self._close)
        holder = f"process {os.getpid()} on host {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        os.ftruncate(self._descriptor, 0)  # a killed holder leaves its text behind
        os.pwrite(self._descriptor, f"{holder}\n".encode(), 0)

    def release(self) -> None:
        """Releases the lock. Deletes directories that were created for it if they contain nothing else."""
        if self._descriptor is None:
            return
        os.ftruncate(self._descriptor, 0)
        if self._created_directories and list(self.path.parent.iterdir()) == [self.path]:
            self.path.unlink()
        with suppress(OSError):  # not empty
            for directory in self._created_directories:
                directory.rmdir()
        self._close()

    def _acquire(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip()
                self._close()
                raise LockHeld(holder or "another process") from None
            if error.errno not in UNSUPPORTED:
                self._close()
                raise
            self.is_supported = False

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
