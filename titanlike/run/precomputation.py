"""What a frozen model computes of all data, once: its batches, and what identifies its weights in the name of a cache."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanlike.config import UserError
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.data.batches.packed_dataset import SequenceBatch, SequenceDataset
from titanlike.data.documents.data_files import local_file, versions_of
from titanlike.distributed import process_group
from titanlike.interop.hf_folder import tensor_files
from titanlike.interop.weights import NO_SHARE, HFWeights, open_weights
from titanlike.parallelisms.mesh import Mesh
from titanlike.utils.file_lock import FileLock, LockHeld


def batches_in_order(
    dataset: SequenceDataset, training: BatchLoader, mesh: Mesh
) -> Iterator[tuple[int, Tensor, Batch]]:
    """Yields the sequences of a dataset in order, each once, and then the first ones again, which fill the last micro-batch.

    Yields micro-batches of this rank, of the shape of those in training, each with the index of the first sequence of all ranks,
    and the places of this rank's sequences after it.
    """
    batch_size = training.local_batch_size * mesh.num_data_ranks
    loader = BatchLoader(
        _InOrder(dataset, batch_size), global_batch_size=batch_size, local_batch_size=training.local_batch_size,
        seed=training.seed, device=training.device, document_separator=training.document_separator,
        **mesh.data_shard(dataset.seq_len),
    )  # fmt: skip
    for step in range(1, -(-dataset.num_sequences // batch_size) + 1):
        (batch,) = loader.microbatches(step)
        places = mesh.data_rank * len(batch.labels) + torch.arange(len(batch.labels), device=training.device)
        yield (step - 1) * batch_size, places, batch


class _InOrder:
    """The sequences of a dataset as a source."""

    fingerprint = ""

    def __init__(self, dataset: SequenceDataset, batch_size: int) -> None:
        self.dataset, self.seq_len, self.batch_size = dataset, dataset.seq_len, batch_size

    def describe(self, steps: int) -> str:
        return self.dataset.contents

    def load_position(self, position: object) -> None:
        """Does nothing: the step number is the only state."""

    def position(self) -> None:
        return None

    def read(self, step: int, rows: range) -> SequenceBatch:
        indices = (step - 1) * self.batch_size + np.array(rows)
        return SequenceBatch(indices, *self.dataset.read(indices % self.dataset.num_sequences))


@contextmanager
def written_once(path: Path) -> Iterator[bool]:
    """Yields whether this run has to write a file or folder of the cache, which is then locked. While another run writes it, all
    ranks wait."""
    locks: list[FileLock] = []

    def wait() -> None:
        try:
            while not path.exists():
                with suppress(LockHeld):
                    locks.append(FileLock(path.with_name(f".{path.name}.lock")))
                    break
                time.sleep(0.1)
        except OSError as error:
            raise UserError(
                f"{path.parent} cannot be written: {error.strerror}; set data.cache to a folder that can"
            ) from None
        if path.exists():  # another run has just written it
            while locks:
                locks.pop().release()

    process_group.run_on_main(wait)
    try:
        yield process_group.broadcast_object(bool(locks))
    finally:
        for lock in locks:
            lock.release()


def version_of_weights(initial: str, seed: int) -> list[Any]:
    """Returns what differs after a change of the weights, or of the seed of random ones."""
    if not initial:
        return ["random", seed]
    weights = open_weights(Path(initial), verify_share=NO_SHARE)
    # A fingerprint is of samples, if the files have no hashes.
    files = tensor_files(weights.path) if isinstance(weights, HFWeights) else []
    return [weights.fingerprint(), *versions_of([local_file(file) for file in files])]
