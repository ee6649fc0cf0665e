"""Whether files and folders that get their name by a rename are complete after a loss of power."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


def identity(status: os.stat_result) -> tuple[int, int]:
    """Returns what a rename does not change."""
    return status.st_dev, status.st_ino


@dataclass
class Disk:
    """What has reached the disk so far: the size of each file and when, counted in calls of fsync and renames."""

    synced: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    renamed: dict[Path, tuple[int, dict[tuple[int, int], tuple[int, int]]]] = field(default_factory=dict)
    calls: int = 0

    def fsync(self, descriptor: int) -> None:
        self.calls += 1
        status = os.fstat(descriptor)
        self.synced[identity(status)] = status.st_size, self.calls

    def rename(self, target: Path) -> None:
        self.calls += 1
        self.renamed[target] = self.calls, dict(self.synced)

    def assert_published(self, path: Path) -> None:
        """Asserts that the content of a file or folder was on the disk before it was renamed, with the names in it, and that the
        new name was on the disk after it."""
        when, before = self.renamed[path]
        for file in [each for each in path.rglob("*") if each.is_file()] or [path]:
            size, last = before.get(identity(file.stat()), (None, 0))
            assert size == file.stat().st_size, f"of {file.name}, fsync was called with {size} bytes"
            folder = before.get(identity(path.stat()), (0, 0))
            assert file == path or folder[1] > last, f"fsync of the folder precedes {file.name}"
        parent = self.synced.get(identity(path.parent.stat()), (0, 0))
        assert parent[1] > when, f"fsync of {path.parent} precedes the rename"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Returns what reaches the disk during the test."""
    found = Disk()
    monkeypatch.setattr(os, "fsync", found.fsync)
    for name in ("rename", "replace"):
        original = getattr(Path, name)

        def recorded(source: Path, target: Any, original: Any = original) -> Any:
            found.rename(Path(target))
            return original(source, target)

        monkeypatch.setattr(Path, name, recorded)
    return found
