"""The likeliest tokens of a teacher for all data, computed once and kept in files, so that training does without the teacher."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from titanlike.config import UserError
from titanlike.data.batches.dataloaders import DataLoaders
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.data.batches.packed_dataset import SequenceDataset, Sequences
from titanlike.data.documents.data_files import hash_of
from titanlike.data.tokens.arrays import Numbers
from titanlike.distributed import collectives, process_group
from titanlike.losses.chunked import Logits
from titanlike.losses.top_k import TopK, top_k_of
from titanlike.parallelisms.mesh import Mesh
from titanlike.recipe.distill import DistillRecipe
from titanlike.run.loop import loop_settings
from titanlike.run.precomputation import batches_in_order, version_of_weights, written_once
from titanlike.utils.system import cache_folder

FORMAT = 1
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"  # the names in a batch, and of the files

TeacherLogits = Callable[[Batch], AbstractContextManager[Logits]]


class WithTopK:
    """A dataset whose sequences also have the likeliest tokens of a teacher."""

    def __init__(self, dataset: SequenceDataset, folder: Path, number: int) -> None:
        self.dataset, self.name, self.seq_len = dataset, dataset.name, dataset.seq_len
        self.num_sequences = dataset.num_sequences
        self.arrays = {name: np.load(_file(folder, name, number), mmap_mode="r") for name in (IDS, LOG_PROBS)}

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @property
    def contents(self) -> str:
        return self.dataset.contents

    def read(self, indices: Numbers) -> Sequences:
        others = {name: values[indices] for name, values in self.arrays.items()}
        return self.dataset.read(indices)._replace(others=others)


def add_top_k(
    recipe: DistillRecipe,
    mesh: Mesh,
    data: DataLoaders,
    initial: str,
    seed: int,
    build_teacher: Callable[[], TeacherLogits],
) -> None:
    """Adds the likeliest tokens to the sequences of the data. What is not in the cache is computed with the teacher.

    Args:
        initial: where the teacher's weights are; empty: they are random, with this seed.
    """
    sources: list[Any] = [each.source for each in (data.training, data.validation) if each]
    datasets: list[SequenceDataset] = [dataset for source in sources for dataset in source.datasets]
    folder = _folder(recipe, datasets, initial, seed)
    with written_once(folder) as is_missing:
        if is_missing:
            num_sequences = sum(dataset.num_sequences for dataset in datasets)
            process_group.announce(f"computing the teacher's likeliest tokens of {num_sequences:,} sequences")
            with loop_settings(recipe.training):  # the kernels of training
                _compute(recipe, build_teacher(), mesh, data.training, datasets, folder)
    if not all(process_group.all_gather_object(folder.is_dir())):
        raise UserError(f"data.cache: not all machines have {folder}; set data.cache to a folder that they share")
    numbers = iter(range(len(datasets)))
    for source in sources:
        source.datasets = [WithTopK(dataset, folder, next(numbers)) for dataset in source.datasets]


def top_k_of_batch(batch: Batch) -> TopK:
    """Returns the likeliest tokens of a batch."""
    return TopK(batch.inputs[IDS], batch.inputs[LOG_PROBS])


@torch.no_grad()
def _compute(
    recipe: DistillRecipe,
    teacher: TeacherLogits,
    mesh: Mesh,
    training: BatchLoader,
    datasets: list[SequenceDataset],
    folder: Path,
) -> None:
    """Writes the likeliest tokens of all sequences: the first process gathers them from all ranks."""
    section, partial = recipe.distillation, folder.with_name(f"{folder.name}.partial")
    k, positions = section.top_k, mesh.position_ids(training.source.seq_len).to(training.device)

    def create() -> None:
        try:
            partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{partial} cannot be written: {error.strerror}; set data.cache to a folder that can"
            ) from None

    process_group.run_on_main(create)
    for number, dataset in enumerate(datasets):
        shape = dataset.num_sequences, dataset.seq_len
        files: dict[str, Any] = {}
        if process_group.is_main():
            for name, dtype, size in ((IDS, np.int32, k), (LOG_PROBS, np.float32, k + 1)):
                path = _file(partial, name, number)
                files[name] = _allocate(path, dtype, (*shape, size))
        for first, rows, batch in batches_in_order(dataset, training, mesh):
            with teacher(batch) as logits:
                found = top_k_of(logits, k, section.temperature, recipe.training.loss_chunk, mesh.vocab_group)
            num_rows = min(len(batch.labels) * mesh.num_data_ranks, dataset.num_sequences - first)
            for name, values in ((IDS, found.ids), (LOG_PROBS, found.log_probs)):
                global_values = values.new_zeros(len(batch.labels) * mesh.num_data_ranks, *shape[1:], values.shape[-1])
                global_values[rows[:, None], positions] = values
                collectives.all_reduce_sum(global_values, mesh.loss_groups)
                if files:
                    files[name][first : first + num_rows] = global_values[:num_rows].cpu().numpy()
        for each in files.values():
            each.flush()
    process_group.run_on_main(lambda: partial.rename(folder))


def _allocate(path: Path, dtype: type, shape: tuple[int, ...]) -> Any:
    """Returns an array in a file whose space is allocated: a write to a full disk would end the process with SIGBUS."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if not hasattr(os, "posix_fallocate"):  # macOS
        return array
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        raise UserError(
            f"{path} needs {path.stat().st_size:,} bytes: {error.strerror}; set data.cache to another disk"
        ) from None
    return array


def _file(folder: Path, name: str, number: int) -> Path:
    return folder / f"{number}-{name}.npy"


def _folder(recipe: DistillRecipe, datasets: list[SequenceDataset], initial: str, seed: int) -> Path:
    """Returns the folder of the likeliest tokens: its name depends on all that decides them."""
    section, data, training = recipe.distillation, recipe.data, recipe.training
    # Which sequences are held out is decided by the recipe.
    tokens = [[dataset.fingerprint, dataset.num_sequences] for dataset in datasets]
    split = [data.holdout_every, data.validation_path != "", data.long_chats, bool(data.masks_documents)]
    precision = [
        (training.compute_dtype, training.matmul_precision),
        training.master_dtype if recipe.float8.all_gather else "",
        asdict(recipe.float8),
    ]
    weights = version_of_weights(initial, seed)
    loss_options = [section.top_k, section.temperature]
    key = hash_of(
        [FORMAT, tokens, split, training.seq_len, asdict(cast(Any, recipe.teacher)), precision, weights, loss_options]
    )
    return cache_folder(data.cache) / "distillation" / f"teacher-{key}"
