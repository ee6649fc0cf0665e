"""Metrics files. A full disk does not stop the run: methods return a warning for the user, or an empty string."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Values = Mapping[str, float | str | None]


class JSONLWriter:
    """Appends one JSON object per record to a file. While the disk is full, records are buffered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._buffer = b""
        self._warned = False

    def log(self, step: int, values: Values) -> str:
        """Writes a record. Returns a warning at the first of consecutive failures."""
        self._buffer += json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            warned, self._warned = self._warned, True
            return "" if warned else f"{self.path}: {error.strerror}; records are buffered until there is space"
        self._warned = False
        return ""

    def close(self) -> str:
        """Closes the file. Returns a warning if records are lost."""
        try:
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


class TensorBoardWriter:
    """Writes TensorBoard events: numbers as scalars, strings as text. After a failure, the library can write no more events."""

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer: Any = SummaryWriter(str(directory), purge_step=first_step)

    def log(self, step: int, values: Values) -> str:
        """Writes the values of a step, except for `tokens`, a multiple of the step."""
        try:
            for name, value in values.items() if self._writer else ():
                if isinstance(value, str):
                    self._writer.add_text(name, value, step)
                elif value is not None and name != "tokens":
                    self._writer.add_scalar(name, value, step)
        except OSError as error:
            return self._disable(error)
        return ""

    def close(self) -> str:
        """Closes the event file."""
        try:
            if self._writer:
                self._writer.close()
        except OSError as error:
            return self._disable(error)
        return ""

    def _disable(self, error: OSError) -> str:
        self._writer = None
        return f"TensorBoard logging is disabled: {error.strerror}"
