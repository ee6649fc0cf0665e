"""Measurement of a run. Records go to the console, to `metrics.jsonl`, to trackers and to Prometheus."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from titanlike.checkpoint import SaveResult
from titanlike.config.sections import Metrics
from titanlike.hardware.files import file_of_device, peak_flops
from titanlike.metrics import health, model_statistics
from titanlike.metrics.hardware import device_name, peak_memory_gib
from titanlike.metrics.records import Records
from titanlike.metrics.terminal import Console
from titanlike.metrics.trackers import RunInfo
from titanlike.utils.async_d2h import AsyncD2H

if TYPE_CHECKING:
    from titanlike.metrics.health import RankStatistics
    from titanlike.metrics.model_statistics import ModelStatistics

DATA_WAIT = "data wait"  # annotation in a trace

SPIKE_WINDOW = 50  # records
SPIKE_THRESHOLD = 10.0  # standard deviations above the median
SPIKE_MIN_RECORDS = 10
STANDARD_DEVIATION = 1.4826  # of a normal distribution, in median absolute deviations
MIN_DEVIATION = 1e-3  # of the median: a loss that hardly changes is not a spike


@dataclass(frozen=True)
class Measured:
    """What a run has measured."""

    memory_gib: float  # peak of this process
    tokens_per_second: float | None  # median over all devices; None after too few steps


@dataclass(kw_only=True)
class Monitor(AbstractContextManager["Monitor"]):
    """Measures throughput from its creation on, and records it every `section.interval` steps and at the first and last step.

    Throughput includes data wait and excludes validation and checkpointing. Only the rank that is passed a `folder` writes
    records.
    """

    device: torch.device
    num_devices: int
    num_steps: int
    first_step: int
    num_tokens: Callable[[int], int]  # of all steps up to and including one
    flops_per_token: int
    section: Metrics
    folder: Path | None
    recipe: Mapping[str, Any]  # for trackers

    def __post_init__(self) -> None:
        self.peak_flops = peak_flops(self.section.hardware or file_of_device(device_name(self.device)))
        self._records: Records | None = None
        if self.folder:
            run = RunInfo(self.folder, self.first_step, self.section.project, self.section.tensorboard_dir, self.recipe)
            self._records = Records(run, self.section, self.num_steps)
        self._console = Console(self.num_steps, self.first_step) if self.folder else None
        self._spikes, self._in_spike = SpikeDetector(), False
        self._ranks: RankStatistics | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._ranks = health.RankStatistics(self.device)
        self._model: ModelStatistics | None = None
        self._model_is_known = False
        self._model_metrics: dict[str, Tensor] = {}  # of the current step
        self._started = self._window_started = time.perf_counter()
        self._window_steps = 0
        self._rates: list[float] = []  # tokens per second of each record
        self._peak_memory_gib = 0.0
        self._data_wait = 0.0
        # Step, values, when the host had enqueued it, learning rate, and names of values.
        self._pending: tuple[int, AsyncD2H, float, float, list[str]] | None = None

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Counts the time of the block as data wait, a part of the step."""
        start = time.perf_counter()
        with record_function(DATA_WAIT):
            yield
        self._data_wait += time.perf_counter() - start

    @contextmanager
    def exclude_from_throughput(self, activity: str = "") -> Iterator[None]:
        """Excludes the time of the block from throughput. The status line shows the activity, such as "validating"."""
        self._flush()
        if self._console:
            self._console.refresh(activity)
        start = time.perf_counter()
        yield
        self._window_started += time.perf_counter() - start
        if self._console:
            self._console.refresh()

    def step(self, step: int, *, loss: Tensor, grad_norm: Tensor, lr: float, **others: Tensor) -> None:
        """Counts a step. On a GPU, it is recorded once the next step is enqueued, so that the host does not wait for it. `others`
        are metrics of the program by name."""
        self._flush(deferred=True)
        self._window_steps += 1
        if self._is_due(step):
            others |= self._model_metrics
            rank_values = [self._ranks.gather(self._data_wait)] if self._ranks else []
            values = AsyncD2H(loss, grad_norm, *others.values(), *rank_values)
            self._pending = step, values, time.perf_counter(), lr, list(others)
            if values.is_on_host or step == self.num_steps:
                self._flush()

    def _is_due(self, step: int) -> bool:
        return step % self.section.interval == 0 or step in (1, self.num_steps)

    def _flush(self, *, deferred: bool = False) -> None:
        """Records the pending step. `deferred`: the next step has been enqueued."""
        if self._pending is None:
            return
        (step, values, enqueued, lr, names), self._pending = self._pending, None
        # A device that has completed the step by now is faster than the host, and completed it when the host had enqueued it.
        waits_for_host = deferred and values.is_complete
        loss, grad_norm, *rest = values.read(deferred=deferred)
        others, rank_values = dict(zip(names, rest, strict=False)), rest[len(names) :]
        now = enqueued if waits_for_host else time.perf_counter()  # when the device has completed the steps
        seconds = now - self._window_started
        tokens = self.num_tokens(step)
        tokens_per_second = (tokens - self.num_tokens(step - self._window_steps)) / seconds
        flops = tokens_per_second * self.flops_per_token / self.num_devices
        self._rates.append(tokens_per_second)
        self._peak_memory_gib = peak_memory_gib(self.device)
        extra, warning = self._ranks.summarize(rank_values) if self._ranks else ({}, "")
        self._log(
            step,
            {
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": lr,
                "tokens": tokens,
                "tokens_per_second": tokens_per_second,
                "tflops_per_device": flops / 1e12,
                "mfu": flops / self.peak_flops if self.peak_flops else None,
                "memory_gib": self._peak_memory_gib,
                "data_wait": self._data_wait / seconds,
                "step_seconds": seconds / self._window_steps,
                "elapsed_seconds": now - self._started,
                **others,
                **extra,
            },
        )
        if warning:
            self.warn(warning)
        self._detect_spike(step, loss)
        self._window_started, self._window_steps, self._data_wait = now, 0, 0.0

    def _detect_spike(self, step: int, loss: float) -> None:
        deviations = self._spikes.deviations(loss)
        if deviations:
            self._track(step, {"loss_spike": deviations})
            if not self._in_spike:
                self.warn(f"step {step}: loss spike: {loss:.4f} is {deviations:.0f} deviations above the recent median")
        self._in_spike = deviations > 0

    @contextmanager
    def model_statistics(self, step: int, model: nn.Module) -> Iterator[None]:
        """Measures what the model has counted in this step, and records norms of gradients, weights and their update for each
        parameter, if that is due. The block updates weights."""
        if not self._model_is_known:
            self._model, self._model_is_known = model_statistics.model_statistics(model, self.device), True
        self._model_metrics = self._model.measure() if self._model and self._is_due(step) else {}
        with self._parameter_statistics(step, model):
            yield
        if self._model:
            self._model.reset()

    @contextmanager
    def _parameter_statistics(self, step: int, model: nn.Module) -> Iterator[None]:
        interval = self.section.layer_interval
        if not interval or step % interval:
            yield
            return
        with health.parameter_statistics(model) as values:
            yield
        self._flush()
        self._track(step, {name: value if math.isfinite(value) else None for name, value in values.items()})

    def validation(self, step: int, loss: float, **others: float) -> None:
        """Records a validation loss, and other values of a validation."""
        values = {f"validation_{name}": value for name, value in ({"loss": loss} | others).items()}
        self._log(step, {**values, "elapsed_seconds": time.perf_counter() - self._started})

    def evaluation(self, step: int, values: Mapping[str, float | str]) -> None:
        """Records the metrics of an evaluation, and a sample."""
        self._flush()
        finite = {
            name: value if isinstance(value, str) or math.isfinite(value) else None for name, value in values.items()
        }
        self._track(step, finite | {"elapsed_seconds": time.perf_counter() - self._started})
        prefix, lines = f"step {step:>6}/{self.num_steps}", dict[str, str]()
        for name, value in values.items():
            if isinstance(value, str):
                lines[name] = f":\n{value}\n"
            else:
                task, _, metric = name.rpartition("/")
                lines[task] = f"{lines.get(task, '')}  {metric} {value:.6g}"
        for name, text in lines.items():
            self.print(f"{prefix}  {name}{text}")

    def skipped(self, step: int, cause: str) -> None:
        """Records a step whose update was skipped, and why."""
        self._flush()
        self._track(step, {"skipped": cause, "elapsed_seconds": time.perf_counter() - self._started})
        self.print(f"step {step:>6}/{self.num_steps}  skipped: {cause}")

    def record_saves(self, results: Sequence[SaveResult]) -> None:
        """Records the results of saves."""
        for result in results:
            if result.error:
                self.warn(f"saving the checkpoint of step {result.step} failed: {result.error}; training continues")
                self._track(result.step, {"save_failed": result.error})
                continue
            if result.cleanup_error:
                self.warn(
                    f"the checkpoint of step {result.step} is saved, but the cleanup failed: {result.cleanup_error}"
                )
            times = {"save_seconds": result.seconds, "save_stall_seconds": result.stall}
            self._log(result.step, {**times, "save_bytes": result.size})

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.print(f"warning: {text}")

    def print(self, text: str | None) -> None:
        """Prints a line, if there is one."""
        if self._console and text is not None:
            self._console.print(text)

    def measured(self) -> Measured:
        """Returns memory and throughput of the steps that have been recorded. The first record, with the warmup, does not count."""
        rate = statistics.median(self._rates[1:]) if len(self._rates) > 1 else None
        return Measured(self._peak_memory_gib, rate)

    def close(self) -> None:
        """Closes the status line, the files and the trackers."""
        if self._console:
            self._console.close()
        for message in self._records.close() if self._records else ():
            self.print(message)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _log(self, step: int, values: Mapping[str, float | None]) -> None:
        # JSON cannot represent NaN and infinity, which a skipped step may have.
        self._track(step, {n: value if value is None or math.isfinite(value) else None for n, value in values.items()})
        if self._console:
            self._console.log(step, values)

    def _track(self, step: int, values: Mapping[str, float | str | None]) -> None:
        for message in self._records.log(step, values) if self._records else ():
            self.print(message)


class SpikeDetector:
    """Detects a loss far above the recent ones. The median and the median absolute deviation of a window do not depend on a few
    spikes in it, and follow a new level after half of the window."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def deviations(self, loss: float) -> float:
        """Adds a loss. Returns its distance from the median in standard deviations if it is a spike, otherwise 0."""
        result = 0.0
        if len(self._window) >= SPIKE_MIN_RECORDS and math.isfinite(loss):
            median = statistics.median(self._window)
            deviation = STANDARD_DEVIATION * statistics.median(abs(value - median) for value in self._window)
            scale = max(deviation, MIN_DEVIATION * abs(median))
            distance = (loss - median) / scale if scale else 0.0  # 0 if recent losses are 0
            result = distance if distance > SPIKE_THRESHOLD else 0.0
        if math.isfinite(loss):
            self._window.append(loss)
        return result
