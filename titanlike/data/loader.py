"""BatchLoader for one rank, made ahead of time: tensors of what a feed says each step reads."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titanlike.data.packed_dataset import BatchSource, SequenceBatch, ShuffledMixture, document_ids_and_positions
from titanlike.data.text.tokenizer import Separator
from titanlike.distributed import process_group
from titanlike.models.loss import IGNORE
from titanlike.utils.counter_rng import derive_seed


@dataclass(frozen=True)
class Batch:
    """What one rank takes through the model at once."""

    # `tokens` and their `positions`; `documents` and `noise` where they are asked for: each (B, T)
    inputs: dict[str, Tensor]
    labels: Tensor  # (B, T): the next token at each place


class BatchLoader:
    """This rank's share of each global batch, in micro-batches."""

    def __init__(
        self,
        feed: BatchSource,
        *,
        global_batch_size: int,
        local_batch_size: int,
        data_rank: int,
        num_data_ranks: int,
        seed: int,
        device: torch.device,
        position_ids: Tensor | None = None,
        document_separator: Separator | None = None,
        dropout_bits: bool = False,
    ) -> None:
        """`position_ids` are the positions of each sequence that this rank holds; default: all. With `document_separator`,
        attention does not cross documents, and positions count from 0 in each of them."""
        self.feed = feed
        self.local_batch_size = local_batch_size
        share = global_batch_size // num_data_ranks
        self.mine = range(data_rank * share, (data_rank + 1) * share)
        self.seed = seed
        self.device = device
        everything = torch.arange(feed.seq_len)
        self.position_ids = everything if position_ids is None else position_ids
        self.has_all = torch.equal(self.position_ids, everything)
        self.default_position_ids = self.position_ids.repeat(share, 1)
        self.document_separator = document_separator
        self.dropout_bits = dropout_bits
        self._position: list[Any] | None = None  # of the feed, after the last step that was taken
        self._prefetcher: _Prefetcher | None = None

    @contextmanager
    def prefetch(self, num_steps: int, first: int, last: int) -> Iterator[None]:
        """Make the batches of these steps in a thread, so many before they are asked for."""
        self._prefetcher = _Prefetcher(self, range(first, last + 1), num_steps) if num_steps else None
        try:
            yield
        finally:
            if self._prefetcher:
                self._prefetcher.stop()
            self._prefetcher = None

    def microbatches(self, step: int) -> list[Batch]:
        """What this rank trains on in a step, counted from 1."""
        tensors, self._position = self._prefetcher.take(step) if self._prefetcher else self.make(step)
        on_device = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
        parts = [
            dict(zip(on_device, part, strict=True))
            for part in zip(*(t.split(self.local_batch_size) for t in on_device.values()), strict=True)
        ]
        return [Batch(labels=part.pop("labels"), inputs=part) for part in parts]

    def position(self) -> list[Any] | None:
        """What it takes, besides the step, to go on from here; None: nothing. All ranks ask together."""
        if self._position is None:
            return None
        lanes = {lane[0]: lane for part in process_group.all_gather_object(self._position) for lane in part}
        return [lanes[number] for number in sorted(lanes)]

    def load_position(self, position: list[Any] | None) -> None:
        """Continues from what `position` returned."""
        self.feed.begin(position)

    def describe(self, steps: int) -> str:
        """Describes the data, and how much of it that many steps read."""
        return self.feed.describe(steps)

    def num_distinct(self, wanted: int) -> int:
        """How many of so many global batches have no window twice; at least one."""
        assert isinstance(self.feed, ShuffledMixture)
        return min(wanted, self.feed.num_distinct)

    def make(self, step: int) -> tuple[dict[str, Tensor], list[Any] | None]:
        """The tensors of all micro-batches, in the host's memory, and the position of the feed after them."""
        rows = self.feed.rows(step, self.mine)
        whole = {name: torch.from_numpy(values) for name, values in self._arrays(rows).items()}
        tensors = {name: t.contiguous() if self.has_all else t[:, self.position_ids] for name, t in whole.items()}
        tensors.setdefault("position_ids", self.default_position_ids)
        if self.dropout_bits:
            tensors["dropout_bits"] = torch.from_numpy(
                _dropout_bits(self.seed, rows.numbers, self.position_ids.numpy())
            )
        if self.device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors, self.feed.position()

    def _arrays(self, rows: SequenceBatch) -> dict[str, npt.NDArray[np.int64]]:
        """What a model is given, for whole sequences (N, T)."""
        tokens, loss_mask = rows.tokens, rows.loss_mask
        arrays = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        if self.document_separator:
            documents, positions = document_ids_and_positions(tokens, self.document_separator)
            same = documents[:, 1:] == documents[:, :-1]  # the first token of a document follows from nothing
            arrays |= {"position_ids": positions[:, :-1], "document_ids": documents[:, :-1]}
            arrays["labels"] = np.where(same, arrays["labels"], IGNORE)
        if loss_mask is not None:
            arrays["labels"] = np.where(loss_mask[:, 1:], arrays["labels"], IGNORE)
        return arrays


class _Prefetcher(threading.Thread):
    """Makes batches in the order of their steps. What goes wrong is raised where the batch is asked for."""

    def __init__(self, batches: BatchLoader, steps: range, most: int) -> None:
        super().__init__(name="batches", daemon=True)  # one that waits for a far-away file must not keep the process
        self.batches = batches
        self.steps = steps
        self.made: queue.Queue[Any] = queue.Queue(most)
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        if self.batches.device.type == "cuda":
            # A thread begins with the first GPU, and would take memory there.
            torch.cuda.set_device(self.batches.device)
        for step in self.steps:
            try:
                result = self.batches.make(step)
            except BaseException as error:  # noqa: BLE001  whatever it is, the thread that trains raises it
                self._put((step, error))
                return
            self._put((step, result))
            if self.stopped.is_set():
                return

    def take(self, step: int) -> tuple[dict[str, Tensor], list[Any] | None]:
        made_for, result = self.made.get()
        if isinstance(result, BaseException):
            raise result
        assert made_for == step, f"the batch of step {made_for} is next, not that of {step}"
        return result

    def stop(self) -> None:
        """Make no more."""
        self.stopped.set()

    def _put(self, item: Any) -> None:
        while not self.stopped.is_set():
            try:
                self.made.put(item, timeout=0.2)
                return
            except queue.Full:
                continue


def _dropout_bits(
    seed: int, sequences: npt.NDArray[np.int64], position_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """32 random bits for each place of each sequence of the stream."""
    start = np.uint64(derive_seed(seed, "dropout"))
    bits = start + (sequences.astype(np.uint64)[:, None] << np.uint64(32)) + position_ids.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return (bits >> np.uint64(32)).astype(np.int64)
