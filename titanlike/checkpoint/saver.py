"""Saving while training goes on, and taking up what was saved.

A save copies what this rank writes to the host, which training waits for, and leaves the rest to a thread: files, hashes,
agreement with the other ranks, commit. One save is under way at most.
"""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from titanlike.checkpoint import format, loader, store
from titanlike.checkpoint.format import CheckpointCorrupt, FileDigest, Reader, ShardSpec
from titanlike.checkpoint.staging import Stage
from titanlike.checkpoint.store import CheckpointMetadata, Store, file_of, name_of, open_store
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint
from titanlike.distributed import process_group
from titanlike.utils.rng import generator_states, restore_generators

T = TypeVar("T")


@dataclass(frozen=True)
class SaveResult:
    """What came of a save."""

    step: int
    size: int  # bytes, of all ranks
    stall: float  # seconds that training stood still
    seconds: float  # until it was committed, or given up
    error: str = ""
    remark: str = ""  # what went wrong after the commit


class CheckpointManager:
    """The checkpoints of one run. All ranks call each method together."""

    def __init__(self, place: str, section: Checkpoint, *, shutdown_timeout: float = 30.0) -> None:
        self.store = open_store(place)
        self.section = section
        self.shutdown_timeout = shutdown_timeout
        self.step = 0  # of the newest that is known to be whole
        self.seconds = 0.0  # that the last save took
        self._failures = 0  # saves in a row that failed
        self._error = ""  # of the last of them
        self._outcomes: list[SaveResult] = []  # that nobody has asked for
        self._stage = Stage()
        self._group: dist.ProcessGroup | None = None
        self._under_way: _Save | None = None

    def find(self, step: int = 0) -> CheckpointMetadata | None:
        """The newest checkpoint that is whole, or the one of this step; None if there is none at all. Every file is looked
        at, by all ranks together, and one that is damaged is named."""
        steps = process_group.broadcast_object(self.store.steps() if process_group.is_main() else [])
        if step and step not in steps:
            there = f"has those of steps {', '.join(map(str, steps))}" if steps else "has none"
            raise UserError(f"checkpoint.resume_from = {step}: there is no such checkpoint; {self.store} {there}")
        problems: list[str] = []
        for number in [step] if step else reversed(steps):
            problem = self._problem(number)
            if problem is None:
                self.step = number
                return process_group.broadcast_object(
                    store.read_state(self.store, number) if process_group.is_main() else None
                )
            problems.append(problem)
            if number != steps[0] and not step:
                process_group.warn(f"{problem}; going back to the checkpoint before it")
        if problems:
            raise UserError(
                f"{problems[-1]}, and there is no earlier checkpoint to go back to; bring the file back, or give --run.name "
                "to start a new run"
                if not step
                else f"checkpoint.resume_from = {step}: {problems[-1]}; name another step, or none"
            )
        return None

    def _problem(self, step: int) -> str | None:
        """What is wrong with a checkpoint, if anything is. Each rank looks at some of the files."""
        world, rank, found = process_group.world_size(), dist.get_rank(), None
        try:
            files = store.read_manifest(self.store, step)
            for name in sorted(files)[rank::world]:
                content = self.section.verify == "content" or name == store.STATE  # which is small
                path, where = self.store.fetch(step, name), f"{self.store}/{name_of(step)}/{name}"
                format.check(path, files[name], content=content, name=where)
            if rank == 0:
                store.read_state(self.store, step)
        except CheckpointCorrupt as damage:
            found = str(damage)
        except OSError as error:
            found = f"{self.store}/{name_of(step)} cannot be read: {error}"
        return next((problem for problem in process_group.all_gather_object(found) if problem), None)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, saved: CheckpointMetadata, **others: nn.Module
    ) -> None:
        """Read this rank's share of a checkpoint into the model and the optimizer, and what else was saved, whatever layout
        saved it. On as many ranks as saved it, each has its random generators back."""
        files = sorted(name for name in store.read_manifest(self.store, saved.step) if name != store.STATE)
        rank = dist.get_rank()
        # This rank's own first: under the same layout it has all that is wanted.
        ordered = files[rank:] + files[:rank]
        reader = Reader([functools.partial(self.store.fetch, saved.step, name) for name in ordered])
        loader.fill(model, optimizer, others, reader)
        if len(files) == process_group.world_size():
            restore_generators(next(reader.headers()).notes["generators"])

    def archive_after(self, step: int) -> None:
        """Later checkpoints than the one that the run goes on from are no more part of it: put them aside."""
        if process_group.is_main():
            for later in self.store.steps():
                if later > step:
                    self.store.archive(later)
                    process_group.warn(f"the checkpoint of step {later} is put aside as {name_of(later)}.aside")
            if step:
                self.store.update_latest(step)  # a run that was killed, or has lost its last, may have named another

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        saved: CheckpointMetadata,
        *,
        wait: bool = False,
        **others: nn.Module,
    ) -> None:
        """Save all ranks' weights and optimizer state, and other modules by names of their own, such as an average of the
        weights. With `mode = "sync"`, or `wait`, it is there when this returns."""
        if wait and self.seconds > self.shutdown_timeout:
            process_group.warn(
                f"the last save took {self.seconds:.0f} s, but run.shutdown_timeout = {self.shutdown_timeout}: if this one is "
                f"cut short, the run goes on from step {self.step}"
            )
        started = time.perf_counter()
        self.wait()
        self._join_group()
        pieces, size = self._stage.take(loader.tensors(model, optimizer, others), optimizer)
        notes = {"step": saved.step, "generators": generator_states()}
        self._under_way = _Save(self.store, self.section, self._group, saved, pieces, notes, size)
        self._under_way.begin(self._stage.arrival, started)
        if wait or self.section.mode == "sync":
            self.wait()

    def poll(self) -> list[SaveResult]:
        """What came of saves that were under way and are no more. Never waits."""
        if self._under_way and not self._under_way.is_alive():
            self._take_outcome()
        told, self._outcomes = self._outcomes, []
        return told

    @property
    def has_failed(self) -> bool:
        """Whether as many saves in a row have failed as may. What this rank knows, others may not know yet."""
        return self._failures >= self.section.max_failures

    def wait(self, *, last: bool = False) -> None:
        """Wait for the save under way, and stop the run if as many have failed as may: if this was the `last`, one."""
        if self._under_way:
            self._take_outcome()
        if self.has_failed or (last and self._failures):
            kept = f"the last whole checkpoint is that of step {self.step}" if self.step else "there is none yet"
            often = f"{self._failures} saves in a row have failed" if self._failures > 1 else "the save failed"
            raise UserError(f"{often}: {self._error}; {kept}")

    def write_weights(self, file: Path, dtype: str) -> None:
        """Write the weights of the newest checkpoint, whole, into one file. Rank 0 alone."""
        assert isinstance(self.store, store.Folder)
        loader.consolidate(self.store.path / name_of(self.step), file, getattr(torch, dtype))

    def close(self, *, wait: bool = True) -> None:
        """Let the save under way end, unless it is not to be waited for, and leave the group."""
        if self._under_way and wait:
            self._under_way.join(timeout=60)  # it may wait for a rank that is gone
        if self._group is not None and not (self._under_way and self._under_way.is_alive()):
            dist.destroy_process_group(self._group)
            self._group = None

    def _join_group(self) -> None:
        if self._group is None and process_group.world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def __enter__(self) -> "CheckpointManager":
        self._join_group()  # now: it takes the launcher, and the launcher's death is a reason to save
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(wait=kind is not KeyboardInterrupt)

    def _take_outcome(self) -> None:
        assert self._under_way
        save, self._under_way = self._under_way, None
        save.join()
        if save.crash:
            raise save.crash
        outcome = save.outcome
        assert outcome
        self._outcomes.append(outcome)
        self._error = outcome.error
        self._failures = self._failures + 1 if outcome.error else 0
        if not outcome.error:
            self.step, self.seconds = outcome.step, outcome.seconds


class _Save(threading.Thread):
    """All of a save but the copying. It talks to the same thread of the other ranks in a group that nobody else uses."""

    def __init__(
        self,
        kept: Store,
        section: Checkpoint,
        group: dist.ProcessGroup | None,
        saved: CheckpointMetadata,
        pieces: list[ShardSpec],
        notes: dict[str, Any],
        size: int,
    ) -> None:
        super().__init__(name=f"save of step {saved.step}", daemon=True)
        self.kept, self.section, self.group = kept, section, group
        self.saved, self.pieces, self.notes, self.size = saved, pieces, notes, size
        self.outcome: SaveResult | None = None
        self.crash: BaseException | None = None

    def begin(self, arrival: torch.cuda.Event | None, started: float) -> None:
        """Go on beside the training, which stood still since `started`."""
        self.arrival, self.started = arrival, started
        self.stall = time.perf_counter() - started
        self.start()

    def run(self) -> None:
        """Save, and keep what came of it for the thread that trains."""
        try:
            error, remark = self._save()
            seconds = time.perf_counter() - self.started
            self.outcome = SaveResult(self.saved.step, self.size, self.stall, seconds, error, remark)
        except BaseException as crash:  # noqa: BLE001  another rank is gone, say: the training thread raises it
            self.crash = crash

    def _save(self) -> tuple[str, str]:
        step = self.saved.step
        main = process_group.is_main()
        error, _ = _attempt(lambda: self.kept.begin(step, self.size)) if main else ("", None)
        if error := self._first_error(error):
            return error, ""
        error, written = _attempt(self._write)
        everyone = self._gather((error, written))
        if error := next((f"rank {rank}: {error}" for rank, (error, _) in enumerate(everyone) if error), ""):
            return error, ""
        remark = ""
        if main:
            files = {file_of(rank): written for rank, (_, written) in enumerate(everyone) if written}
            error, _ = _attempt(lambda: store.commit(self.kept, self.saved, files))
            if not error:
                keep = self.section.keep
                remark, _ = _attempt(
                    lambda: store.prune(self.kept, step, keep=keep, keep_every=self.section.keep_every)
                )
        return self._first_error(error), remark

    def _write(self) -> FileDigest:
        if self.arrival is not None:
            self.arrival.synchronize()
        with self.kept.create(self.saved.step, file_of(dist.get_rank())) as stream:
            return format.write(stream, self.pieces, self.notes)

    def _first_error(self, error: str) -> str:
        return next((one for one in self._gather(error) if one), "")

    def _gather(self, value: T) -> list[T]:
        return [value] if self.group is None else process_group.all_gather_object(value, self.group)


def _attempt(do: Callable[[], T]) -> tuple[str, T | None]:
    """What is wrong, if anything is, and what came of it."""
    try:
        return "", do()
    except Exception as error:  # noqa: BLE001  whatever a file system or a remote store may raise: the run goes on without
        return f"{type(error).__name__}: {error}" if not isinstance(error, OSError | UserError) else str(error), None
