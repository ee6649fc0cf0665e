"""Reads `metrics.jsonl`, also while a run appends to it."""

import math
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from titanlike.tools.metrics_file import parse_record

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 2**20  # bytes read at once: its records stay in the processor's cache
MISSING = math.inf  # JSON has no infinity
OTHER, TRAINING, VALIDATION, SKIPPED = range(4)  # kinds of records
VALUES = (
    "step", "elapsed_seconds", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "mfu",
    "memory_gib",
)  # fmt: skip


class Record(msgspec.Struct, gc=False):
    """The values of a record that are compared. A value is None if it was not finite."""

    step: int
    loss: float | None = MISSING
    validation_loss: float | None = MISSING
    skipped: str | None = None
    elapsed_seconds: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None


class MetricsReader:
    """The records of a metrics file. Each `read` adds the lines that have been written since the one before.

    A last line that is not yet complete is left for the next `read`. A line that is no record is counted as damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(Record)
        self._reset()

    def _reset(self) -> None:
        self.damaged_lines: list[int] = []
        self._offset = self._num_lines = self._inode = 0
        self._chunks: list[dict[str, NDArray[np.float64]]] = []

    def read(self) -> dict[str, "NDArray[np.float64]"]:
        """Returns the columns of all records in the order of the file: their `kind` and `VALUES`. NaN is missing or not finite."""
        with suppress(FileNotFoundError):  # a run that has just started
            found = self.path.stat()
            if found.st_ino != self._inode or found.st_size < self._offset:  # a resume replaces the file
                self._reset()
                self._inode = found.st_ino
            self._read_new_lines()
        names = ("kind", *VALUES)
        if len(self._chunks) > 1:
            self._chunks = [{name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in names}]
        return self._chunks[0] if self._chunks else {name: np.zeros(0) for name in names}

    def _read_new_lines(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            rest = b""
            while content := file.read(CHUNK):
                complete, newline, rest = (rest + content).rpartition(b"\n")
                self._add(complete + newline)
        if rest.endswith(b"}") and self._decode_line(rest):  # complete, only without the line break
            self._add(rest)

    def _add(self, content: bytes) -> None:
        try:
            records = self._decoder.decode_lines(content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            records = []
            for number, line in enumerate(content.split(b"\n"), self._num_lines + 1):
                if record := self._decode_line(line):
                    records.append(record)
                elif line.strip():
                    self.damaged_lines.append(number)
        self._offset += len(content)
        self._num_lines += content.count(b"\n")
        if records:
            self._chunks.append(_columns(records))

    def _decode_line(self, line: bytes) -> Record | None:
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        try:
            return msgspec.convert(parse_record(line), Record)
        except msgspec.ValidationError:
            return None


def _columns(records: list[Record]) -> dict[str, "NDArray[np.float64]"]:
    columns = {
        name: np.array(list(map(attrgetter(name), records)), dtype=np.float64) for name in VALUES
    }  # None becomes NaN
    kinds = np.full(len(records), OTHER, dtype=np.float64)
    kinds[[record.skipped is not None for record in records]] = SKIPPED
    for name, kind in (("validation_loss", VALIDATION), ("loss", TRAINING)):
        kinds[columns[name] != MISSING] = kind
    return columns | {"kind": kinds}
