"""Whether files and folders that get their name by a rename are complete after a loss of power."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Disk:
    """What has reached the disk so far: the size of each file, and when that and its name did, in calls of fsync and renames."""

    synced: dict[Path, tuple[int, int]] = field(default_factory=dict)
    renamed: dict[Path, tuple[Path, dict[Path, tuple[int, int]], int]] = field(default_factory=dict)
    calls: int = 0

    def fsync(self, descriptor: int) -> None:
        self.calls += 1
        self.synced[Path(f"/proc/self/fd/{descriptor}").readlink()] = os.fstat(descriptor).st_size, self.calls

    def rename(self, source: Path, target: Path) -> None:
        self.calls += 1
        self.renamed[target] = source, dict(self.synced), self.calls
        if source in self.synced:
            self.synced[target] = self.synced[source][0], self.calls

    def assert_published(self, path: Path) -> None:
        """Asserts that the content of a file or folder was on the disk before it was renamed, with the names in it, and that the
        new name was on the disk after it."""
        source, synced, when = self.renamed[path]
        for file in [each for each in path.rglob("*") if each.is_file()] or [path]:
            size, last = synced.get(source / file.relative_to(path), (None, 0))
            assert size == file.stat().st_size, f"of {file.name}, fsync was called with {size} bytes"
            assert file == path or synced[source][1] > last, f"fsync of the folder precedes {file.name}"
        assert self.synced[path.parent][1] > when, f"fsync of {path.parent} precedes the rename"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Returns what reaches the disk during the test."""
    found = Disk()
    monkeypatch.setattr(os, "fsync", found.fsync)
    for name in ("rename", "replace"):
        original = getattr(Path, name)

        def recorded(source: Path, target: Any, original: Any = original) -> Any:
            found.rename(source, Path(target))
            return original(source, target)

        monkeypatch.setattr(Path, name, recorded)
    return found
