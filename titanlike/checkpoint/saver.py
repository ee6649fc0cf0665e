"""The checkpoints of a run: saves during training, and loads.

A save copies the tensors that this rank writes to host memory, which blocks training. A thread does the rest: it writes and hashes
the files, synchronizes with the other ranks, and commits. At most one save is in progress.
"""

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from titanlike.checkpoint import format, loader, store
from titanlike.checkpoint.format import CheckpointCorrupt, FileDigest, Reader, ShardSpec
from titanlike.checkpoint.staging import Stage
from titanlike.checkpoint.store import CheckpointMetadata, file_of, name_of, open_store
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint
from titanlike.distributed import process_group
from titanlike.utils.rng import generator_states, restore_generators

T = TypeVar("T")
CLOSE_TIMEOUT = 60.0  # seconds that `close` waits for a save, whose thread may wait for a dead rank


@dataclass(frozen=True)
class SaveResult:
    """The result of a save."""

    step: int
    size: int  # bytes, of all ranks
    stall: float  # seconds that training was blocked
    seconds: float  # from the start to the commit, or to the failure
    error: str = ""
    cleanup_error: str = ""  # a failure after the commit: the checkpoint is valid


class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """Saves, finds and loads the checkpoints of one run, in a directory or at a URL. All ranks call its methods together."""

    def __init__(self, location: str, section: Checkpoint, *, shutdown_timeout: float = 30.0) -> None:
        self.store = open_store(location)
        self.section = section
        self.shutdown_timeout = shutdown_timeout
        self.step = 0  # of the newest valid checkpoint known
        self._last_seconds = 0.0  # duration of the last successful save
        self._failures = 0  # consecutive
        self._error = ""  # of the last save
        self._results: list[SaveResult] = []  # not yet polled
        self._stage = Stage()
        # Created up front: this needs the launcher, and a save may be due to the launcher's death.
        self._group = dist.new_group(backend="gloo") if process_group.world_size() > 1 else None
        self._save: Future[SaveResult] | None = None  # in progress

    def find(self, step: int = 0) -> CheckpointMetadata | None:
        """Returns the newest valid checkpoint, or the one of `step`; None if there is no checkpoint. The ranks verify all files
        together, and warn about each corrupt checkpoint that is passed over."""
        steps = process_group.broadcast_object(self.store.steps() if process_group.is_main() else [])
        if step and step not in steps:
            available = f"contains steps {', '.join(map(str, steps))}" if steps else "contains no checkpoints"
            raise UserError(f"checkpoint.resume_from = {step}: no such checkpoint; {self.store} {available}")
        problem = ""
        for candidate in [step] if step else reversed(steps):
            if problem:
                process_group.warn(f"{problem}; falling back to the previous checkpoint")
            problem, metadata = self._verify(candidate)
            if metadata:
                self.step = candidate
                return metadata
        if problem and step:
            raise UserError(f"checkpoint.resume_from = {step}: {problem}; choose another step, or omit the key")
        if problem:
            raise UserError(
                f"{problem}, and there is no earlier checkpoint; restore the file, or set --run.name to start a new run"
            )
        return None

    def _verify(self, step: int) -> tuple[str, CheckpointMetadata | None]:
        """Verifies a checkpoint, each rank a part of its files. Returns the first problem, or an empty string and the metadata."""
        rank, problem, metadata = dist.get_rank(), "", None
        try:
            files = store.read_manifest(self.store, step)
            for name in sorted(files)[rank :: process_group.world_size()]:
                content = self.section.verify == "content" or name == store.STATE  # the latter is small
                path, full_name = self.store.fetch(step, name), f"{self.store}/{name_of(step)}/{name}"
                format.verify_file(path, files[name], content=content, name=full_name)
            metadata = store.read_state(self.store, step)
        except CheckpointCorrupt as error:
            problem = str(error)
        except OSError as error:
            problem = f"{self.store}/{name_of(step)} cannot be read: {error}"
        problem = next(filter(None, process_group.all_gather_object(problem)), "")
        return problem, None if problem else metadata

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, metadata: CheckpointMetadata, **others: nn.Module
    ) -> None:
        """Loads a checkpoint into the model, the optimizer and other modules, whatever layout saved it. Restores the random
        generators of each rank if the number of ranks is the same."""
        names = sorted(name for name in store.read_manifest(self.store, metadata.step) if name != store.STATE)
        rank = dist.get_rank()
        names_own_first = names[rank:] + names[:rank]  # under the same layout, a rank needs only its own file
        reader = Reader(self.store.fetch(metadata.step, name) for name in names_own_first)
        loader.load_tensors(model, optimizer, others, reader)
        if len(names) == process_group.world_size():
            restore_generators(next(reader.headers()).notes["generators"])

    def archive_after(self, step: int) -> None:
        """Archives the checkpoints later than `step`, from which the run resumes: they are no longer part of it."""
        if process_group.is_main():
            for later in self.store.steps():
                if later > step:
                    self.store.archive(later)
                    process_group.warn(f"archived the checkpoint of step {later} as {name_of(later)}.archived")
            if step:
                self.store.update_latest(step)  # an interrupted run, or the archived steps, may have left another name

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        metadata: CheckpointMetadata,
        *,
        wait: bool = False,
        **others: nn.Module,
    ) -> None:
        """Saves the model, the optimizer and other modules, such as an average of the weights. With `wait`, or
        `checkpoint.mode = "sync"`, returns after the commit; else after the copy to host memory."""
        if wait and self._last_seconds > self.shutdown_timeout:
            process_group.warn(
                f"the last save took {self._last_seconds:.0f} s, but run.shutdown_timeout = {self.shutdown_timeout}: if this "
                f"save is interrupted, the run resumes from step {self.step}"
            )
        started = time.perf_counter()
        self.wait()
        shards = self._stage.copy(loader.named_tensors(model, optimizer, others), optimizer)
        run = functools.partial(self._run_save, metadata, shards, {"generators": generator_states()}, started)
        self._save = _start_thread(f"save of step {metadata.step}", run)
        if wait or self.section.mode == "sync":
            self.wait()

    def poll(self) -> list[SaveResult]:
        """Returns the results of saves that ended since the last call. Does not block."""
        if self._save and self._save.done():
            self._collect()
        results, self._results = self._results, []
        return results

    @property
    def has_failed(self) -> bool:
        """Whether `checkpoint.max_failures` consecutive saves have failed. May differ between ranks until they synchronize."""
        return self._failures >= self.section.max_failures

    def wait(self, *, last: bool = False) -> None:
        """Waits for the save in progress. Raises if too many consecutive saves failed, or if the `last` one of the run did."""
        if self._save:
            self._collect()
        if self.has_failed or (last and self._failures):
            kept = f"the last valid checkpoint is that of step {self.step}" if self.step else "there is no checkpoint"
            failed = f"{self._failures} consecutive saves failed" if self._failures > 1 else "the save failed"
            raise UserError(f"{failed}: {self._error}; {kept}")

    def write_weights(self, file: Path, dtype: str) -> None:
        """Writes the full weights of the newest checkpoint into one file. Called by rank 0 only."""
        assert isinstance(self.store, store.LocalStore)
        loader.consolidate(self.store.path / name_of(self.step), file, getattr(torch, dtype))

    def close(self, *, wait: bool = True) -> None:
        """Waits for the save in progress, unless `wait` is False, and destroys the process group of the saves."""
        if self._save and wait:
            concurrent.futures.wait([self._save], timeout=CLOSE_TIMEOUT)
        if self._group is not None and (self._save is None or self._save.done()):
            dist.destroy_process_group(self._group)
            self._group = None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(wait=kind is not KeyboardInterrupt)

    def _collect(self) -> None:
        """Waits for the save in progress and records its result. Raises what ended its thread, such as a dead rank."""
        assert self._save
        save, self._save = self._save, None
        result = save.result()
        self._results.append(result)
        self._error = result.error
        self._failures = self._failures + 1 if result.error else 0
        if not result.error:
            self.step, self._last_seconds = result.step, result.seconds

    def _run_save(
        self, metadata: CheckpointMetadata, shards: list[ShardSpec], notes: dict[str, Any], started: float
    ) -> SaveResult:
        """Does all of a save but the copy to host memory, in a thread."""
        size, stall = self._stage.size, time.perf_counter() - started
        error = cleanup_error = ""
        try:
            self._on_all_ranks(lambda: self.store.begin(metadata.step, size), main_only=True)
            digests = self._on_all_ranks(lambda: self._write(metadata.step, shards, notes))
            cleanup_error = self._on_all_ranks(lambda: self._commit(metadata, digests), main_only=True)[0]
        except _SaveError as failure:
            error = str(failure)
        return SaveResult(metadata.step, size, stall, time.perf_counter() - started, error, cleanup_error)

    def _write(self, step: int, shards: list[ShardSpec], notes: dict[str, Any]) -> FileDigest:
        if self._stage.arrival is not None:
            self._stage.arrival.synchronize()
        with self.store.create(step, file_of(dist.get_rank())) as stream:
            return format.write(stream, shards, notes)

    def _commit(self, metadata: CheckpointMetadata, digests: list[FileDigest]) -> str:
        """Commits, then deletes old checkpoints. Returns the error of the latter: the checkpoint is valid all the same."""
        store.commit(self.store, metadata, {file_of(rank): digest for rank, digest in enumerate(digests)})
        try:
            store.prune(self.store, metadata.step, keep=self.section.keep, keep_every=self.section.keep_every)
        except Exception as error:  # noqa: BLE001  as below
            return _message(error)
        return ""

    def _on_all_ranks(self, function: Callable[[], T], *, main_only: bool = False) -> list[T]:
        """Calls a function on all ranks, or on rank 0. Returns the results of all ranks, or raises the first error on all ranks."""
        error, result = "", None
        if not main_only or process_group.is_main():
            try:
                result = function()
            except Exception as failure:  # noqa: BLE001  file systems raise anything: the run continues without this save
                error = _message(failure)
        results = [(error, result)]
        if self._group is not None:
            results = process_group.all_gather_object((error, result), self._group)
        for rank, (error, _) in enumerate(results):
            if error:
                raise _SaveError(f"rank {rank}: {error}")
        return [cast(T, result) for _, result in results]


class _SaveError(Exception):
    """A save failed on one of the ranks."""


def _start_thread(name: str, function: Callable[[], T]) -> Future[T]:
    """Calls a function in a daemon thread: the process must be able to exit while the thread waits for a dead rank."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised in the training thread
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | UserError) else f"{type(error).__name__}: {error}"
