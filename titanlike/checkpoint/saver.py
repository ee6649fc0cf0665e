"""The checkpoints of a run: saves during training, and loads.

A save copies the tensors that this rank writes to host memory, which blocks training. A thread does the rest: it writes and hashes
the files, synchronizes with the other ranks, and publishes the checkpoint. At most one save is in progress.
"""

import concurrent.futures
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from titanlike.checkpoint import format, loader, optimizer_values, reader, store
from titanlike.checkpoint.files import file_of, name_of
from titanlike.checkpoint.format import FileDigest, ShardSpec
from titanlike.checkpoint.optimizer_values import OptimizerValues
from titanlike.checkpoint.owner import Claim
from titanlike.checkpoint.staging import StagingBuffers, named_tensors
from titanlike.checkpoint.store import CheckpointMetadata, LocationLost, open_store
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint
from titanlike.distributed import process_group
from titanlike.utils.daemon_thread import start_daemon_thread
from titanlike.utils.rng import generator_states, restore_generators

if TYPE_CHECKING:
    from titanlike.checkpoint.reader import Entry

T = TypeVar("T")
CLOSE_TIMEOUT = 60.0  # seconds that `close` waits for a save, whose thread may wait for a dead rank


@dataclass(frozen=True)
class SaveResult:
    """The result of a save."""

    step: int
    size: int  # bytes, of all ranks
    stall: float  # seconds that training was blocked
    seconds: float  # from the start until it is published, or to the failure
    error: str = ""
    cleanup_error: str = ""  # a failure after that: the checkpoint is valid


class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """Saves, finds and loads the checkpoints of one run, in a directory or at a URL. All ranks call its methods together."""

    _claim: "Claim | None" = None  # to a location outside of the run directory

    def __init__(
        self, location: str, section: Checkpoint, *, owner: Path | None = None, shutdown_timeout: float = 30.0
    ) -> None:
        """`owner` is the directory of the run. If it is given, the location is refused while it belongs to another run. It is
        not needed for a location inside of the run directory, which has a lock."""
        self.store = open_store(location)
        self.section = section
        if owner:
            self._claim = Claim(self.store, owner, allow_other="run.dir" in section.allow_changed)
        self._must_stop = False  # no later save can succeed
        self.shutdown_timeout = shutdown_timeout
        self.step = 0  # of the newest valid checkpoint known
        self._entries: dict[str, dict[str, Entry]] = {}  # of each file of that checkpoint
        self._records: dict[str, Any] = {}  # of its optimizer: values that are not tensors
        self._values: OptimizerValues | None = None
        self._last_seconds = 0.0  # duration of the last successful save
        self._failures = 0  # consecutive
        self._error = ""  # of the last save
        self._results: list[SaveResult] = []  # not yet polled
        self._stage = StagingBuffers()
        # Created up front: this needs the launcher, and a save may be due to the launcher's death.
        self._group = process_group.copy_of_world()
        self._save: Future[SaveResult] | None = None  # in progress

    def find(self, step: int = 0) -> CheckpointMetadata | None:
        """Returns the newest valid checkpoint, or the one of `step`; None if there is no checkpoint. The ranks verify all files
        together, and warn about each corrupt checkpoint that is passed over."""
        steps = self._from_main(self._owned_steps)
        if step and step not in steps:
            available = f"contains steps {', '.join(map(str, steps))}" if steps else "contains no checkpoints"
            raise UserError(f"checkpoint.resume_from = {step}: no such checkpoint; {self.store} {available}")
        if not steps:
            return None
        problem = ""
        for candidate in [step] if step else reversed(steps):
            if problem:
                process_group.warn(f"{problem}; falling back to the previous checkpoint")
            problem, metadata, self._entries = loader.verify(
                self.store, candidate, content=self.section.verify == "content"
            )
            if metadata:
                self.step, self._records = candidate, metadata.optimizer
                return metadata
        if problem and step:
            raise UserError(f"checkpoint.resume_from = {step}: {problem}; choose another step, or omit the key")
        raise UserError(
            f"{problem}, and there is no earlier checkpoint; restore the file, or set --run.name to start a new run"
        )

    def _owned_steps(self) -> list[int]:
        if self._claim:
            self._claim.check()
        return self.store.steps()

    def register(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_new: bool = True) -> OptimizerValues:
        """Registers an optimizer before its first step, after which state that cannot be saved is refused. Options of parameter
        groups that it changes are saved; without `is_new`, those that differ from its defaults."""
        if self._values is None or self._values.optimizer is not optimizer:
            self._values = OptimizerValues(model, optimizer, is_new=is_new)
        return self._values

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, metadata: CheckpointMetadata, **others: nn.Module
    ) -> None:
        """Loads the checkpoint that `find` returned, once, into the model, the optimizer and other modules, whatever layout saved
        it. Restores the random generators of each rank if the number of ranks is the same."""
        if not self._entries or metadata.step != self.step:
            raise UserError(f"step {metadata.step} was not verified; call find() before load()")
        files = {name: self.store.open(metadata.step, name) for name in sorted(self._entries)}
        shards = reader.TensorReader(reader.Header(file, self._entries[name], {}) for name, file in files.items())
        values, num_threads = self.register(model, optimizer), self.store.num_readers
        loader.load_tensors(model, optimizer, others, shards, values, self._records, num_threads=num_threads)
        if len(files) == process_group.world_size():
            restore_generators(reader.read_header(files[file_of(dist.get_rank())]).notes["generators"])
        self._entries = {}
        self.store.delete_downloads()

    def archive_after(self, step: int) -> None:
        """Begins a run that resumes from `step`, or a new one if it is 0: claims the location for the run, and archives later
        checkpoints, which are no longer part of it."""
        for later in self._from_main(lambda: self._archive_after(step)):
            process_group.warn(f"archived the checkpoint of step {later} as {name_of(later)}.archived")

    def _archive_after(self, step: int) -> list[int]:
        if not self.section.enabled:  # this run changes nothing there
            return []
        if self._claim:
            self._claim.acquire()
        archived = [later for later in self.store.steps() if later > step]
        for later in archived:
            self.store.archive(later)
        if step:
            self.store.update_latest(step)  # an interrupted run, or the archived steps, may have left another name
        return archived

    def _from_main(self, function: Callable[[], T]) -> T:
        """Calls a function, which accesses the location, on rank 0. Returns its result, or raises `UserError`, on all ranks."""
        error, result = "", None
        if process_group.is_main():
            try:
                result = function()
            except UserError as failure:
                error = str(failure)
            except Exception as failure:  # noqa: BLE001  file systems raise anything
                error = f"checkpoint.dir: {self.store} cannot be used: {_message(failure)}; repair or choose another"
        error, result = process_group.broadcast_object((error, result))
        if error:
            raise UserError(error)
        return cast(T, result)

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
        `checkpoint.mode = "sync"`, returns after it is published; else after the copy to host memory."""
        if wait and self._last_seconds > self.shutdown_timeout:
            process_group.warn(
                f"the last save took {self._last_seconds:.0f} s, but run.shutdown_timeout = {self.shutdown_timeout}: if this "
                f"save is interrupted, the run resumes from step {self.step}"
            )
        started = time.perf_counter()
        self.wait()
        values = self.register(model, optimizer, is_new=False).as_text()
        shards = self._stage.copy(named_tensors(model, optimizer, others), optimizer)
        run = functools.partial(self._run_save, metadata, shards, {"generators": generator_states()}, values, started)
        self._save = start_daemon_thread(f"save of step {metadata.step}", run)
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
        """Whether `checkpoint.max_failures` consecutive saves have failed, or all others will. May differ between ranks until
        they synchronize."""
        return self._failures >= self.section.max_failures or self._must_stop

    def wait(self, *, last: bool = False) -> None:
        """Waits for the save in progress. Raises if too many consecutive saves failed, or if the `last` one of the run did."""
        if self._save:
            self._collect()
        if self.has_failed or (last and self._failures):
            kept = f"the last valid checkpoint is of step {self.step}" if self.step else "there is no checkpoint"
            failed = f"{self._failures} consecutive saves failed" if self._failures > 1 else "the save failed"
            raise UserError(f"{failed}: {self._error}; {kept}")

    def newest(self) -> Path:
        """Returns the directory of the newest checkpoint, which must be local. Called by rank 0 only."""
        assert isinstance(self.store, store.LocalStore)
        self._verify_claim()  # else it may be a checkpoint of another run
        return self.store.path / name_of(self.step)

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
        self, metadata: CheckpointMetadata, shards: list[ShardSpec], notes: dict[str, Any], values: str, started: float
    ) -> SaveResult:
        """Does all of a save but the copy to host memory, in a thread."""
        size, stall = self._stage.size, time.perf_counter() - started
        error = cleanup_error = ""
        try:
            merged = optimizer_values.merge(self._on_all_ranks(lambda: values))
            metadata = replace(metadata, optimizer=merged)
            self._on_all_ranks(lambda: self._begin(metadata.step, size), main_only=True)
            digests = self._on_all_ranks(lambda: self._write(metadata.step, shards, notes))
            cleanup_error = self._on_all_ranks(lambda: self._publish_and_prune(metadata, digests), main_only=True)[0]
        except (_SaveError, UserError) as failure:
            error, self._must_stop = str(failure), isinstance(failure, UserError) or failure.location_lost
        return SaveResult(metadata.step, size, stall, time.perf_counter() - started, error, cleanup_error)

    def _verify_claim(self) -> None:
        if self._claim:
            self._claim.verify()

    def _begin(self, step: int, size: int) -> None:
        self._verify_claim()
        self.store.begin(step, size)

    def _write(self, step: int, shards: list[ShardSpec], notes: dict[str, Any]) -> FileDigest:
        self._stage.wait()
        with self.store.create(step, file_of(dist.get_rank())) as stream:
            return format.write(stream, shards, notes)

    def _publish_and_prune(self, metadata: CheckpointMetadata, digests: list[FileDigest]) -> str:
        """Publishes the checkpoint, then deletes old ones. Returns the error of the deletion: the checkpoint is valid."""
        self._verify_claim()
        store.complete(self.store, metadata, {file_of(rank): digest for rank, digest in enumerate(digests)})
        try:
            store.prune(self.store, metadata.step, keep=self.section.keep, keep_every=self.section.keep_every)
        except Exception as error:  # noqa: BLE001  as below
            return _message(error)
        return ""

    def _on_all_ranks(self, function: Callable[[], T], *, main_only: bool = False) -> list[T]:
        """Calls a function on all ranks, or on rank 0. Returns the results of all ranks, or raises the first error on all ranks."""
        error, location_lost, result = "", False, None
        if not main_only or process_group.is_main():
            try:
                result = function()
            except Exception as failure:  # noqa: BLE001  file systems raise anything: the run continues without this save
                error, location_lost = _message(failure), isinstance(failure, LocationLost)
        results = [(error, location_lost, result)]
        if self._group is not None:
            results = process_group.all_gather_object(results[0], self._group)
        for rank, (error, location_lost, _) in enumerate(results):
            if error:
                raise _SaveError(f"rank {rank}: {error}", location_lost)
        return [cast(T, result) for *_, result in results]


class _SaveError(Exception):
    """A save failed on one of the ranks."""

    def __init__(self, message: str, location_lost: bool) -> None:
        super().__init__(message)
        self.location_lost = location_lost


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | UserError) else f"{type(error).__name__}: {error}"
