"""Batches of one rank as tensors, prefetched by torchdata."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchdata.nodes import BaseNode, Prefetcher

from titanlike.config import UserError
from titanlike.config.layout import BatchSizes, Ramp
from titanlike.data.batches.batch_record import record_batch
from titanlike.data.batches.next_tokens import next_tokens
from titanlike.data.batches.packed_dataset import (
    BatchSource,
    Position,
    SequenceBatch,
    positions_in_documents,
    separate_documents,
)
from titanlike.data.tokens.tokenizer import Separator
from titanlike.distributed import process_group
from titanlike.losses import IGNORE
from titanlike.utils.counter_rng import token_bits

_Item = tuple[int, dict[str, Tensor], Position | None]  # step, tensors, position of the source after the step


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank."""

    # tokens, position_ids and, if enabled, document_ids and dropout_bits: (B, T) each, and what else the sequences have
    inputs: dict[str, Tensor]
    labels: Tensor  # (B, T)


class BatchLoader:
    """This rank's rows of each global batch, split into micro-batches."""

    def __init__(
        self,
        source: BatchSource,
        *,
        global_batch_size: int,
        batch_ramp: Ramp = (),
        local_batch_size: int,
        data_rank: int,
        num_data_ranks: int,
        seed: int,
        device: torch.device,
        position_ids: Tensor | None = None,
        document_separator: Separator | None = None,
        dropout_bits: bool = False,
        num_next_tokens: int = 0,
        vocab_size: int | None = None,
        record: Path | None = None,
    ) -> None:
        """`position_ids` selects the positions of each sequence that this rank holds (default: all). With
        `document_separator`, positions count from 0 in each document and `document_ids` are added for the attention mask.
        `num_next_tokens` adds that many later tokens of each position, and their labels. With `vocab_size`, other tokens are
        refused. `record` is a file for the hashes of the sequences."""
        self.source = source
        self.local_batch_size = min(local_batch_size, global_batch_size // num_data_ranks)
        self.batch_sizes = BatchSizes(global_batch_size, batch_ramp)
        self.data_rank, self.num_data_ranks = data_rank, num_data_ranks
        self.seed = seed
        self.device = device
        all_positions = torch.arange(source.seq_len)
        self.position_ids = all_positions if position_ids is None else position_ids
        self.holds_all_positions = torch.equal(self.position_ids, all_positions)
        self.default_position_ids = self.position_ids.repeat(global_batch_size // num_data_ranks, 1)
        self.document_separator = document_separator
        self.dropout_bits, self.num_next_tokens = dropout_bits, num_next_tokens
        self.vocab_size = vocab_size
        self.record = record
        self._position: Position | None = None  # of the source, after the last batch that was taken
        self._prefetcher: Prefetcher[_Item | BaseException] | None = None

    @contextmanager
    def prefetch(self, num_batches: int, first_step: int, last_step: int) -> Iterator[None]:
        """Builds the batches of these steps in a thread, up to `num_batches` ahead of the training loop."""
        if num_batches:
            # Each item carries its own state, so the prefetcher takes no snapshots.
            self._prefetcher = Prefetcher(_Batches(self, first_step, last_step), num_batches, snapshot_frequency=0)
            self._prefetcher.reset()  # starts the thread
        try:
            yield
        finally:
            self._prefetcher = None  # torchdata stops the thread; it waits 0.5 s at most if a read is blocked

    def microbatches(self, step: int) -> list[Batch]:
        """Returns the micro-batches of a step, which counts from 1."""
        item = next(self._prefetcher) if self._prefetcher else self.build(step)
        if isinstance(item, BaseException):
            raise item
        built_for, tensors, self._position = item
        assert built_for == step, f"the next batch is for step {built_for}, not {step}"
        on_device = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
        parts = [
            dict(zip(on_device, part, strict=True))
            for part in zip(*(t.split(self.local_batch_size) for t in on_device.values()), strict=True)
        ]
        return [Batch(labels=part.pop("labels"), inputs=part) for part in parts]

    def position(self) -> Position | None:
        """Returns the state of all ranks' sources after the last step, for a checkpoint. A collective; None: no state."""
        if self._position is None:
            return None
        entries = {entry[0]: entry for part in process_group.all_gather_object(self._position) for entry in part}
        return [entries[number] for number in sorted(entries)]

    def first_batches(self, limit: int) -> Iterator[list[Batch]]:
        """Yields the micro-batches of the first `limit` global batches, the same ones at each call. Yields fewer, but at least
        one, if the source has `num_distinct` and a sequence would repeat."""
        self.source.load_position(None)
        for step in range(1, min(limit, getattr(self.source, "num_distinct", limit)) + 1):
            yield self.microbatches(step)

    def build(self, step: int) -> _Item:
        """Returns the step, the CPU tensors of all its micro-batches, and the position of the source after it."""
        num_rows = self.batch_sizes.of(step) // self.num_data_ranks
        batch = self.source.read(step, range(self.data_rank * num_rows, (self.data_rank + 1) * num_rows))
        self._check(step, batch.tokens, num_rows)
        arrays = self._arrays(batch)
        if self.record is not None:
            record_batch(self.record, step, self.data_rank, arrays)
        tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
        if not self.holds_all_positions:
            tensors = {name: tensor[:, self.position_ids] for name, tensor in tensors.items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        if "position_ids" not in tensors:
            if len(self.default_position_ids) != num_rows:
                self.default_position_ids = self.position_ids.repeat(num_rows, 1)
            tensors["position_ids"] = self.default_position_ids
        if self.dropout_bits:
            bits = token_bits(self.seed, "dropout", batch.sequence_ids, self.position_ids.numpy())
            tensors["dropout_bits"] = torch.from_numpy(bits)
        if self.device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return step, tensors, self.source.position()

    def _check(self, step: int, tokens: npt.NDArray[np.int64], num_rows: int) -> None:
        expected = (num_rows, self.source.seq_len + 1)
        if tokens.shape != expected:
            raise UserError(
                f"step {step}: the data source {type(self.source).__name__} has tokens of shape {tokens.shape}, not {expected}"
            )
        if self.vocab_size is not None and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            token = tokens.min() if tokens.min() < 0 else tokens.max()
            raise UserError(
                f"step {step}: the data has the token {token}, but model.vocab_size = {self.vocab_size}; correct the data, or "
                "use a model with a larger vocabulary"
            )

    def _arrays(self, batch: SequenceBatch) -> dict[str, npt.NDArray[np.int64]]:
        """Returns the model inputs and labels for full sequences (N, T)."""
        tokens, loss_mask, document_ids = batch.tokens, batch.loss_mask, batch.document_ids
        arrays = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:] if batch.labels is None else batch.labels}
        if document_ids is None and self.document_separator:
            document_ids = separate_documents(tokens, self.document_separator)
        if document_ids is not None:
            positions = positions_in_documents(document_ids)
            arrays |= {"position_ids": positions[:, :-1], "document_ids": document_ids[:, :-1]}
            if batch.labels is None:  # the first token of a document has no context to be predicted from
                same = document_ids[:, 1:] == document_ids[:, :-1]
                arrays["labels"] = np.where(same, arrays["labels"], IGNORE)
        if loss_mask is not None:
            arrays["labels"] = np.where(loss_mask[:, 1:], arrays["labels"], IGNORE)
        if self.num_next_tokens:
            arrays |= next_tokens(tokens, arrays["labels"], arrays.get("document_ids"), self.num_next_tokens)
        return arrays | dict(batch.others)


class _Batches(BaseNode[_Item | BaseException]):
    """Yields the batches of successive steps, each with the position of the source after it.

    The position travels with the batch: a checkpoint records the batches taken, not those prefetched. An exception is yielded
    as the last item, because torchdata would replace it by a new one with the traceback as its message.
    """

    def __init__(self, loader: BatchLoader, first_step: int, last_step: int) -> None:
        super().__init__()
        self.loader = loader
        self.steps = iter(range(first_step, last_step + 1))

    def next(self) -> _Item | BaseException:
        step = next(self.steps)
        if self.loader.device.type == "cuda":
            torch.cuda.set_device(self.loader.device)  # new threads use GPU 0, and would allocate memory there
        try:
            return self.loader.build(step)
        except BaseException as error:  # noqa: BLE001  raised in the training thread, at its step
            self.steps = iter(())
            return error

    def get_state(self) -> dict[str, Any]:
        return {}
