"""One process at a time: a lock that the system itself takes back when its holder dies, however it dies. No torch."""

import errno
import fcntl
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

# Of file systems that have no locks: some networks', Lustre without its option.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
HELD = (errno.EWOULDBLOCK, errno.EACCES)  # EACCES where locks go over a network


class LockHeld(Exception):
    """Another process has the lock. The text is what it wrote of itself."""


class FileLock:
    """A file that one process holds. While it is held it says who holds it; afterwards it stays, and is empty."""

    def __init__(self, path: Path) -> None:
        """Take the lock, and make the folders above it. Raises `Held`, or `OSError` where there can be no such file."""
        self.path = path
        self._made = [folder for folder in path.parents if not folder.exists()]
        self._descriptor: int | None = None
        self.works = True
        """Whether the file system has locks. Without them nobody is kept out."""
        # Another may take the folder away between our opening the file and locking it: then it is not the file of that name.
        while self._descriptor is None or not os.fstat(self._descriptor).st_nlink:
            self._close()
            self._take()
        # A child that were to hold the file open would hold the lock after our death. It is closed for what is executed; a
        # child that is a mere copy of this process closes it here.
        os.register_at_fork(after_in_child=self._close)
        words = f"process {os.getpid()} on host {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        os.ftruncate(self._descriptor, 0)  # what a killed one has left
        os.pwrite(self._descriptor, f"{words}\n".encode(), 0)

    def release(self) -> None:
        """Let others have it. Folders that were made for the lock, and hold nothing else, are taken away."""
        if self._descriptor is None:
            return
        os.ftruncate(self._descriptor, 0)
        if self._made and list(self._made[0].iterdir()) == [self.path]:
            self.path.unlink()
        with suppress(OSError):  # there is something in it
            for folder in self._made:
                folder.rmdir()
        self._close()

    def _take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip()
                self._close()
                raise LockHeld(holder or "another process") from None
            if error.errno not in WITHOUT_LOCKS:
                self._close()
                raise
            self.works = False

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
