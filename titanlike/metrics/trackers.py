"""What receives the records of a run, and the thread in which it runs, so that it never delays or stops training."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from titanlike.utils.daemon_thread import start_daemon_thread

Values = Mapping[str, float | str | None]
CLOSE_TIMEOUT = 10.0  # seconds that the end of a run waits for trackers
QUEUE_SIZE = 1000  # records


@dataclass(frozen=True)
class RunInfo:
    """What a tracker shows of a run besides its records."""

    folder: Path
    first_step: int
    project: str
    tensorboard_dir: str
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


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            items += _flatten(value, f"{prefix}{name}.")
        else:
            items.append((prefix + name, value if isinstance(value, bool | int | float | str) else json.dumps(value)))
    return items
