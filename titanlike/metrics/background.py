"""Runs a tracker in a thread, so that it never delays or stops training."""

import queue
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from titanlike.metrics.records import CLOSE_TIMEOUT, Tracker, Values
from titanlike.utils.daemon_thread import start_daemon_thread

QUEUE_SIZE = 1000  # records


class Retried(Exception):
    """A problem that does not end a tracker. Its message is a warning to the user."""


class BackgroundTracker:
    """A tracker in a daemon thread, which builds it as well: a login takes seconds. Its `package` is imported before, because an
    import in another thread slows the steps down. `abandon` makes a package that does not answer let the process exit.

    If the tracker is slow, records are buffered, and dropped once there are `QUEUE_SIZE`. If it raises another exception than
    `Retried`, it is disabled. `messages` has what to tell the user, each thing once.
    """

    def __init__(
        self, name: str, build: Callable[[], Tracker], package: str = "", abandon: Callable[[], object] = lambda: None
    ) -> None:
        self.name = name
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._build, self._abandon = build, abandon
        self._records: queue.SimpleQueue[tuple[int, Values] | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        try:
            if package:
                import_module(package)
        except Exception as error:  # noqa: BLE001  as in the thread
            self._disable(error)
        else:
            self._thread.start()

    def log(self, step: int, values: Values) -> None:
        """Passes a record to the thread. Does not wait."""
        if not self._thread.is_alive():
            return
        if self._records.qsize() < QUEUE_SIZE:
            self._records.put((step, values))
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            self._warn(f"is behind by {QUEUE_SIZE:,} records; until it catches up, it receives no more")

    def begin_close(self) -> None:
        """Ends the tracker after the records so far."""
        self._records.put(None)

    def close(self, deadline: float) -> None:
        """Waits until the tracker has ended, at most until a time of `time.monotonic`."""
        if self._thread.ident:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"has not answered for {CLOSE_TIMEOUT:.0f} s; its last records may be lost")
            start_daemon_thread(f"abandon {self.name}", self._abandon)
        elif self._num_dropped:
            self._warn(f"has missed {self._num_dropped:,} records; metrics.jsonl has them")

    def _run(self) -> None:
        try:
            tracker = self._build()
            if tracker.location:
                self.messages.put(f"{self.name:<7} {tracker.location}")
            while (record := self._records.get()) is not None:
                try:
                    tracker.log(*record)
                except Retried as error:
                    self._warn(str(error))
            tracker.close()
        except Retried as error:  # at the end
            self._warn(str(error))
        except BaseException as error:  # noqa: BLE001  the libraries raise anything, and training goes on
            self._disable(error)

    def _disable(self, error: BaseException) -> None:
        self._warn(f"is disabled, training continues: {_first_line(error)}")

    def _warn(self, text: str) -> None:
        self.messages.put(f"warning: {self.name} {text}")


def _first_line(error: BaseException) -> str:
    text: Any = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text).splitlines()[0]
