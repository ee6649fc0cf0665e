"""Measures a run while it trains, and hands each record to the screen, to `metrics.jsonl` and to TensorBoard."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlike.checkpoint import SaveResult
from titanlike.metrics.hardware import device_name, peak_flops, peak_memory_gib
from titanlike.metrics.terminal import Screen
from titanlike.metrics.trackers import Records
from titanlike.utils.async_d2h import AsyncD2H


class Monitor:
    """Counts tokens and seconds from the moment it is made. Only a rank that is given a folder shows and keeps them."""

    def __init__(
        self,
        *,
        device: torch.device,
        num_devices: int,
        num_steps: int,
        first_step: int,
        tokens_per_step: int,
        flops_per_token: int,
        interval: int,
        folder: Path | None,
        tensorboard: bool,
    ) -> None:
        self.device = device
        self.num_devices = num_devices
        self.num_steps = num_steps
        self.interval = interval
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak = peak_flops(device_name(device))
        self.records = Records(folder / "metrics.jsonl") if folder else None
        self.screen = Screen(num_steps, first_step) if folder else None
        self.tensorboard: Any = None
        if folder and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self.started = self.window_started = time.perf_counter()
        self.window_steps = 0
        self._data_wait = 0.0
        self.unseen: tuple[int, AsyncD2H, float] | None = None

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Time in here is part of the step, and told apart as data wait."""
        start = time.perf_counter()
        yield
        self._data_wait += time.perf_counter() - start

    @contextmanager
    def exclude_from_throughput(self) -> Iterator[None]:
        """Time in here (validation, saving) does not count in the training rates."""
        self._record_last()
        start = time.perf_counter()
        yield
        self.window_started += time.perf_counter() - start

    def step(self, step: int, *, loss: Tensor, grad_norm: Tensor, learning_rate: float) -> None:
        """A step is on its way. Every `interval` steps, and at the first and the last, it is recorded: on a GPU when the
        next one is on its way too."""
        self._record_last()
        self.window_steps += 1
        if step % self.interval == 0 or step in (1, self.num_steps):
            self.unseen = step, AsyncD2H(loss, grad_norm), learning_rate
            if self.unseen[1].here or step == self.num_steps:
                self._record_last()

    def _record_last(self) -> None:
        """Record the step that is not recorded yet, if there is one."""
        if self.unseen is None:
            return
        (step, numbers, learning_rate), self.unseen = self.unseen, None
        loss, grad_norm = numbers.read()
        now = time.perf_counter()  # after reading: the device has finished what is being timed
        seconds = now - self.window_started
        tokens_per_second = self.window_steps * self.tokens_per_step / seconds
        flops = tokens_per_second * self.flops_per_token / self.num_devices
        self._record(
            step,
            {
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": learning_rate,
                "tokens": step * self.tokens_per_step,
                "tokens_per_second": tokens_per_second,
                "tflops_per_device": flops / 1e12,
                "mfu": flops / self.peak if self.peak else None,
                "memory_gib": peak_memory_gib(self.device),
                "data_wait": self._data_wait / seconds,
                "step_seconds": seconds / self.window_steps,
                "elapsed_seconds": now - self.started,
            },
        )
        self.window_started, self.window_steps, self._data_wait = time.perf_counter(), 0, 0.0

    def validation(self, step: int, loss: float) -> None:
        """Record a validation loss."""
        self._record(step, {"validation_loss": loss, "elapsed_seconds": time.perf_counter() - self.started})

    def record_saves(self, outcomes: Sequence[SaveResult]) -> None:
        """Record what came of saves."""
        for outcome in outcomes:
            if outcome.error:
                self.warn(f"the checkpoint of step {outcome.step} was not saved: {outcome.error}; training goes on")
                continue
            if outcome.remark:
                self.warn(f"step {outcome.step} is saved, but {outcome.remark}")
            times = {"save_seconds": outcome.seconds, "save_stall_seconds": outcome.stall}
            self._record(outcome.step, {**times, "save_bytes": outcome.size})

    def warn(self, text: str) -> None:
        """Tell the user what is not right and does not stop the run."""
        self.print(f"warning: {text}")

    def skipped(self, step: int, cause: str) -> None:
        """Record a step whose update was left out, and why."""
        self._record_last()
        self._keep(step, {"skipped": cause, "elapsed_seconds": time.perf_counter() - self.started})
        self.print(f"step {step:>6}/{self.num_steps}  skipped: {cause}")
        if self.tensorboard:
            self.tensorboard.add_text("skipped", cause, step)

    def print(self, text: str) -> None:
        """Tell the user something that is not a number."""
        if self.screen:
            self.screen.note(text)

    def close(self) -> None:
        """Finish the line and the files."""
        if self.records and (problem := self.records.close()):
            self.warn(problem)
        if self.screen:
            self.screen.close()
        try:
            if self.tensorboard:
                self.tensorboard.close()
        except OSError as error:
            self._leave_tensorboard(error)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _record(self, step: int, values: dict[str, float | None]) -> None:
        # Those of a skipped step may be no numbers. JSON has no word for that.
        known = {n: value if value is None or math.isfinite(value) else None for n, value in values.items()}
        self._keep(step, known)
        if self.screen:
            self.screen.show(step, values)
        try:
            for name, value in known.items() if self.tensorboard else ():
                if value is not None and name != "tokens":
                    self.tensorboard.add_scalar(name, value, step)
        except OSError as error:
            self._leave_tensorboard(error)

    def _keep(self, step: int, values: Mapping[str, float | str | None]) -> None:
        if self.records and (problem := self.records.add({"step": step, **values})):
            self.warn(problem)

    def _leave_tensorboard(self, error: OSError) -> None:
        """It can write no more after it could not once. The same numbers are in the records."""
        self.tensorboard = None
        self.warn(f"nothing more is written for TensorBoard: {error.strerror}")
