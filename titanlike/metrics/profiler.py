"""Traces of training steps by torch.profiler, and memory snapshots: what `[profiling]` asks for."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titanlike.config.sections import Profiling
from titanlike.distributed import environment
from titanlike.utils import compat
from titanlike.utils.live_line import print_line

DIRECTORY = "profile"  # in the run directory


def trace_name(step: int, rank: int) -> str:
    """Returns the file name of a trace."""
    return f"step-{step}-rank-{rank}.json.gz"


class Profiler(AbstractContextManager["Profiler"]):
    """Traces the steps and ranks that `[profiling]` names, and does nothing at others.

    Writes a trace for Perfetto and `titanlike profile`. With `profiling.memory` on a GPU, it also writes a memory snapshot: the
    allocations since the start of the run, at the end of each trace and at an out-of-memory error.

    Args:
        section: The section of the recipe.
        run: The run directory.
        device: The device of this rank.
        pause: Returns a context in which a trace starts or is written. Its time does not count for the step.
    """

    def __init__(
        self,
        section: Profiling,
        run: Path,
        device: torch.device,
        pause: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._folder = run / DIRECTORY
        self._rank = environment.rank_info().rank
        self._device = device
        self._pause = pause
        is_traced = self._rank in section.ranks
        self._starts = set(section.steps) if is_traced else set()
        self._num_steps = section.num_steps
        self._records_memory = is_traced and section.memory and device.type == "cuda"
        self._profile: profile | None = None
        self._first = 0  # step of the current trace
        self._mark: record_function | None = None  # of the current step, in the trace
        if self._records_memory:
            compat.record_memory_history()

    def step(self, step: int) -> None:
        """Starts, continues or ends a trace. Called at the beginning of each step."""
        if self._profile and step == self._first + self._num_steps:
            self._stop()
        if step in self._starts and not self._profile:
            with self._pause("starting the profiler"):
                self._synchronize()
                self._first = step
                activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
                self._profile = profile(activities=activities, acc_events=True)  # without, torch 2.11 warns
                self._profile.start()
        if self._profile:
            self._mark_step(step)

    def _mark_step(self, step: int) -> None:
        if self._mark:
            self._mark.__exit__(None, None, None)
        self._mark = record_function(f"step {step}") if step else None
        if self._mark:
            self._mark.__enter__()

    def _stop(self) -> None:
        # All kernels of the last step belong to the trace. No collective may run: with gloo, that would corrupt the heap. At the
        # end of a step none does.
        self._synchronize()
        self._mark_step(0)
        current, self._profile = self._profile, None
        if current is None:
            return
        with self._pause("writing the trace"):
            current.stop()
            name = trace_name(self._first, self._rank)
            self._write(name, current.export_chrome_trace)
            if self._records_memory:
                self._write(name.replace(".json.gz", ".pickle"), compat.dump_memory_snapshot)

    def _write(self, name: str, write: Callable[[str], None]) -> None:
        """Writes a file. A full disk, for example, does not end training, nor hide the error that ends it."""
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except (OSError, RuntimeError) as error:
            print_line(f"warning: {path} cannot be written: {error}")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._records_memory and kind and issubclass(kind, torch.OutOfMemoryError):
            self._write(f"out_of_memory-rank-{self._rank}.pickle", compat.dump_memory_snapshot)
        elif self._profile and kind is None:  # the run ends within the steps to trace
            self._stop()
