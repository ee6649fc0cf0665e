"""What a tracker gets and has, and the tracker of every run: a file of JSON lines."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titanlike.utils.atomic_io import atomic_write_text

Values = Mapping[str, float | str | None]
CLOSE_TIMEOUT = 10.0  # seconds that the end of a run waits for trackers


@dataclass(frozen=True)
class RunInfo:
    """What a tracker shows of a run besides its records."""

    folder: Path
    first_step: int
    project: str
    recipe: Mapping[str, Any]  # nested, of plain values

    def recipe_text(self) -> str:
        """Returns the resolved recipe as TOML."""
        path = self.folder / "recipe.toml"
        return path.read_text() if path.exists() else json.dumps(self.recipe, indent=1)

    def hparams(self) -> dict[str, bool | int | float | str]:
        """Returns the recipe's values by dotted key."""
        return dict(_flatten(self.recipe))


class Tracker(Protocol):
    """Receives records. A method that raises an exception disables it."""

    location: str
    """Where to see the run, or "" if that is known."""

    def log(self, step: int, values: Values) -> None:
        """Records the values of a step. None stands for a value that is not finite, or unknown."""

    def close(self) -> None:
        """Writes what is buffered."""


def tag(name: str) -> str:
    """Returns the name of a value with its group: `train/loss`, `validation/loss`, `checkpoint/save_seconds`."""
    if "/" in name:  # an evaluation, or a layer
        return name
    if name.startswith("validation_"):
        return name.replace("_", "/", 1)
    return f"{'checkpoint' if name.startswith('save_') else 'train'}/{name}"


class JSONLWriter:
    """Appends one JSON object per record to a file. While the disk is full, records are buffered. A file that was deleted is
    written again, with all its records. Methods return a warning for the user, or an empty string."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b", buffering=0)
        self._buffer = b""
        self._warned = False

    def log(self, step: int, values: Values) -> str:
        """Writes a record. Returns a warning at the first of consecutive failures."""
        self._buffer += json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"
        try:
            warning = self._restore()
            self._flush()
        except OSError as error:
            warned, self._warned = self._warned, True
            return "" if warned else f"{self.path}: {error.strerror}; records are buffered until there is space"
        self._warned = False
        return warning

    def close(self) -> str:
        """Closes the file. Returns a warning if records are lost."""
        try:
            self._restore()
            self._flush()
        except OSError as error:
            lost = self._buffer.count(b"\n")
            return f"{self.path}: {error.strerror}; the last {lost} records are lost"
        finally:
            self._file.close()
        return ""

    def _flush(self) -> None:
        while self._buffer:
            self._buffer = self._buffer[self._file.write(self._buffer) :]

    def _restore(self) -> str:
        """Writes a deleted file again: its content exists as long as it is open."""
        if os.fstat(self._file.fileno()).st_nlink:
            return ""
        self._file.seek(0)
        content = self._file.read()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.path, content.decode())
        self._file.close()
        self._file = self.path.open("a+b", buffering=0)
        return f"{self.path} was deleted; it is written again"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            items += _flatten(value, f"{prefix}{name}.")
        else:
            items.append((prefix + name, value if isinstance(value, bool | int | float | str) else json.dumps(value)))
    return items
