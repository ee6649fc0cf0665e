"""The file that keeps a run's numbers: a line of JSON a record. A full disk does not end the run: records wait for room."""

import json
from pathlib import Path
from typing import Any


class Records:
    """Adds lines to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("ab", buffering=0)
        self.waiting = b""  # for room
        self.told = False

    def add(self, record: dict[str, Any]) -> str:
        """Write a record, after those that wait. Returns what to tell the user, once, if there is no room for it."""
        self.waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            problem = "" if self.told else f"{self.path}: {error.strerror}; its records wait for room"
            self.told = True
            return problem
        self.told = False
        return ""

    def close(self) -> str:
        """Leave the file. Returns what to tell the user if records are lost."""
        try:
            self._write()
        except OSError as error:
            lost = self.waiting.count(b"\n")
            return f"{self.path}: {error.strerror}; its last {lost} records are lost"
        finally:
            self.file.close()
        return ""

    def _write(self) -> None:
        while self.waiting:
            self.waiting = self.waiting[self.file.write(self.waiting) :]
