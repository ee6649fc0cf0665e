"""The destinations of a run's records: `metrics.jsonl`, trackers and Prometheus. None of them can stop the run."""

import time
from collections.abc import Callable
from functools import partial

from titanlike.config.sections import Metrics
from titanlike.metrics.background import CLOSE_TIMEOUT, BackgroundTracker
from titanlike.metrics.prometheus import PrometheusEndpoint
from titanlike.metrics.services import MLflowTracker, WandbTracker, abandon_wandb
from titanlike.metrics.trackers import JSONLWriter, RunInfo, TensorBoardTracker, Tracker, Values

TRACKERS: dict[str, tuple[str, Callable[[RunInfo], Tracker], str]] = {
    "tensorboard": ("TensorBoard", TensorBoardTracker, "torch.utils.tensorboard"),
    "wandb": ("W&B", WandbTracker, "wandb"),
    "mlflow": ("MLflow", MLflowTracker, "mlflow"),
}


class Records:
    """Passes records on. Methods return what to tell the user."""

    def __init__(self, run: RunInfo, section: Metrics, num_steps: int) -> None:
        self._file = JSONLWriter(run.folder / "metrics.jsonl")
        self._trackers: list[BackgroundTracker] = []
        for tracker in section.trackers:
            name, build, package = TRACKERS[tracker]
            abandon = abandon_wandb if tracker == "wandb" else lambda: None
            self._trackers.append(BackgroundTracker(name, partial(build, run), package, abandon))
        self._endpoint: PrometheusEndpoint | None = None
        self._messages: list[str] = []
        if section.prometheus:
            address, _, port = section.prometheus.rpartition(":")
            try:
                self._endpoint = PrometheusEndpoint(address.strip("[]"), int(port), run.folder.name, num_steps)
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
