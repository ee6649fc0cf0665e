"""The reference model of a preference loss: the trained model without its adapters, a second model, or what one has computed."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.data.batches.dataloaders import DataLoaders
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.data.batches.preference_sequences import PackedPairs
from titanlike.data.documents.data_files import hash_of
from titanlike.distributed import collectives, process_group
from titanlike.interop.weights import load_initial
from titanlike.models.common.lora import disabled_adapters
from titanlike.parallelisms.mesh import Mesh
from titanlike.recipe.dpo import DpoRecipe
from titanlike.run.answers import Places, Reference, answers_of, places_of
from titanlike.run.loop import loop_settings
from titanlike.run.precomputation import batches_in_order, version_of_weights, written_once
from titanlike.run.second_model import build_frozen_model
from titanlike.utils.atomic_write import atomic_writer
from titanlike.utils.system import cache_folder

FORMAT = 1


def build_reference(
    recipe: DpoRecipe, model: nn.Module, mesh: Mesh, device: torch.device, data: DataLoaders
) -> Reference | None:
    """Returns the reference of a recipe, or None if its loss has none. Call it before the weights of the model are restored: what
    is not in the cache is computed with the model and its initial weights."""
    if recipe.reference == "none":
        return None
    if recipe.reference == "precomputed":
        table = _read_or_compute(recipe, model, mesh, data)
        on_device = torch.from_numpy(table).to(device, collectives.sum_dtype(device))
        return lambda batch, places: on_device[places.document_ids.clamp(max=len(table) - 1)]
    adapted = recipe.reference == "adapter_off"
    if not adapted:
        process_group.announce("building the reference model")
        model = build_frozen_model(recipe.model, recipe.checkpoint.initial, recipe, mesh, device, loss_reduction="none")

    @torch.no_grad()
    def reference(batch: Batch, places: Places) -> Tensor:
        with disabled_adapters(model) if adapted else nullcontext():
            return answers_of(model, _without_dropout(batch), places, mesh).log_probs

    return reference


def _without_dropout(batch: Batch) -> Batch:
    return Batch({name: value for name, value in batch.inputs.items() if name != "dropout_bits"}, batch.labels)


def _read_or_compute(recipe: DpoRecipe, model: nn.Module, mesh: Mesh, data: DataLoaders) -> np.ndarray[Any, Any]:
    """Returns the log-probability of each document by its id, on all ranks."""
    sources: list[Any] = [each.source for each in (data.training, data.validation) if each]
    datasets: list[PackedPairs] = [dataset for source in sources for dataset in source.datasets]
    file = _cache_file(recipe, datasets)
    with written_once(file) as is_missing:
        if is_missing:
            return _compute_and_save(recipe, model, mesh, data, datasets, file)
        table: Any = np.load(file)["log_probs"] if process_group.is_main() else None
        return process_group.broadcast_object(table)


def _compute_and_save(
    recipe: DpoRecipe, model: nn.Module, mesh: Mesh, data: DataLoaders, datasets: Sequence[PackedPairs], file: Path
) -> np.ndarray[Any, Any]:
    num_sequences = sum(dataset.num_sequences for dataset in datasets)
    process_group.announce(f"computing the reference's log-probabilities of {num_sequences:,} sequences")
    if recipe.checkpoint.initial:
        load_initial(model, recipe.checkpoint.initial, recipe.model, recipe.checkpoint.allow_changed)
    with loop_settings(recipe.training):  # the kernels of training
        table = _compute(model, mesh, data.training, datasets)

    def save() -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(file) as stream:
                np.savez(stream, log_probs=table)
        except OSError as error:
            raise UserError(
                f"{file.parent} cannot store the reference's log-probabilities: {error.strerror}; set data.cache to a writable "
                "folder"
            ) from None

    process_group.run_on_main(save)
    return table


@torch.no_grad()
def _compute(
    model: nn.Module, mesh: Mesh, training: BatchLoader, datasets: Sequence[PackedPairs]
) -> np.ndarray[Any, Any]:
    """Returns the log-probability of each document under the model, in micro-batches of the shape of those in training."""
    size = 2 * max(dataset.first_pair + dataset.num_pairs_in_all for dataset in datasets)
    table = torch.zeros(size, device=training.device, dtype=collectives.sum_dtype(training.device))
    for dataset in datasets:
        for first, rows, batch in batches_in_order(dataset, training, mesh):
            places = places_of(batch, mesh)
            answers = answers_of(model, batch, places, mesh)
            is_new = first + rows < dataset.num_sequences
            found = answers.is_pair & is_new[:, None]
            table[places.document_ids[found].flatten()] = answers.log_probs[found].flatten()
    if mesh.context.get_local_rank() > 0:  # which has computed the same as the first one
        table.zero_()
    return collectives.all_reduce_sum(table, mesh.loss_groups).cpu().numpy()


def _cache_file(recipe: DpoRecipe, datasets: Sequence[PackedPairs]) -> Path:
    """Returns the file of the log-probabilities: its name depends on all that decides them."""
    initial, data, training = recipe.checkpoint.initial, recipe.data, recipe.training
    # The tokens depend on the data, the tokenizer and the template. Which pairs are held out is decided by the recipe.
    tokens = [
        [dataset.fingerprint, dataset.first_pair, dataset.held_out, dataset.holdout_every] for dataset in datasets
    ]
    precision = [
        (training.compute_dtype, training.matmul_precision),
        training.master_dtype if recipe.float8.all_gather else "",
        asdict(recipe.float8),
    ]
    key = hash_of(
        [
            FORMAT,
            tokens,
            training.seq_len,
            data.long_chats,
            asdict(cast(Any, recipe.model)),
            precision,
            version_of_weights(initial, recipe.run.seed),
        ]
    )
    return cache_folder(data.cache) / "preferences" / f"reference-{key}.npz"
