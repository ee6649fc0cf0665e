"""The destinations of a run's records: `metrics.jsonl`, trackers and Prometheus. None of them can stop the run."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.config.sections import Metrics
from titanlike.metrics import prometheus
from titanlike.metrics.services import start_tracker
from titanlike.metrics.trackers import CLOSE_TIMEOUT, BackgroundTracker, RunInfo, Values

if TYPE_CHECKING:
    from titanlike.metrics.prometheus import PrometheusEndpoint


class JSONLWriter:
    """Appends one JSON object per record to a file. While the disk is full, records are buffered. Methods return a warning for the
    user, or an empty string."""

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


class Records:
    """Passes records on. Methods return what to tell the user."""

    def __init__(self, run: RunInfo, section: Metrics, num_steps: int) -> None:
        self._file = JSONLWriter(run.folder / "metrics.jsonl")
        self._trackers: list[BackgroundTracker] = []
        if section.trackers:
            self._trackers += [start_tracker(name, run) for name in section.trackers]
        self._endpoint: PrometheusEndpoint | None = None
        self._messages: list[str] = []
        if section.prometheus:
            address, _, port = section.prometheus.rpartition(":")
            try:
                self._endpoint = prometheus.PrometheusEndpoint(
                    address.strip("[]"), int(port), run.folder.name, num_steps
                )
            except OSError as error:
                self._messages.append(
                    f"warning: no metrics for Prometheus, training continues: {section.prometheus}: {error.strerror}"
                )

    def log(self, step: int, values: Values) -> list[str]:
        """Records the values of a step."""
        if warning := self._file.log(step, values):
            self._messages.append(f"warning: {warning}")
        for tracker in self._trackers:
            tracker.log(step, values)
        if self._endpoint:
            self._endpoint.log(step, values)
        return self._take_messages()

    def close(self) -> list[str]:
        """Writes what is buffered. Waits for slow trackers, but not long."""
        for tracker in self._trackers:
            tracker.begin_close()
        if warning := self._file.close():
            self._messages.append(f"warning: {warning}")
        if self._endpoint:
            self._endpoint.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for tracker in self._trackers:
            tracker.close(deadline)
        return self._take_messages()

    def _take_messages(self) -> list[str]:
        messages, self._messages = self._messages, []
        for tracker in self._trackers:
            while not tracker.messages.empty():
                messages.append(tracker.messages.get())
        return messages
