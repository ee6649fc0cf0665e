"""The batches of a run: opens the data that a recipe names and shards each global batch over the data-parallel ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from titanlike.config.sections import Data, Training
from titanlike.data.loader import BatchLoader
from titanlike.data.packed_dataset import BatchSource
from titanlike.data.sources import Sources, open_sources
from titanlike.data.text.tokenizer import Tokenizer
from titanlike.distributed import process_group


@dataclass(frozen=True)
class DataLoaders:
    """The batches of one rank."""

    training: BatchLoader
    validation: BatchLoader | None
    fingerprint: str  # identifies the data; a resume compares it


def build_dataloaders(
    section: Data,
    training: Training,
    tokenizer: Tokenizer,
    *,
    seed: int,
    validate: bool,
    dropout: bool,
    data_rank: int,
    num_data_ranks: int,
    position_ids: Tensor,
    device: torch.device,
    open_sources: Callable[..., Sources] = open_sources,
) -> DataLoaders:
    """Opens the training and validation data. All ranks call it together, and fail if their data differ.

    Args:
        validate: whether to hold out or open validation data.
        dropout: whether batches carry random bits for dropout.
        position_ids: the positions of each sequence that this rank holds; see `context_position_ids`.
        open_sources: opens the data; replace it to read a dataset of your own.
    """
    sources = open_sources(
        section,
        tokenizer,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        seed=seed,
        validate=validate,
    )
    fingerprint = process_group.assert_equal_across_ranks("the data", sources.fingerprint)

    def loader(source: BatchSource, *, dropout_bits: bool = False) -> BatchLoader:
        return BatchLoader(
            source,
            global_batch_size=training.global_batch_size,
            local_batch_size=training.local_batch_size,
            data_rank=data_rank,
            num_data_ranks=num_data_ranks,
            position_ids=position_ids,
            seed=seed,
            device=device,
            document_separator=tokenizer.separator if section.document_masks else None,
            dropout_bits=dropout_bits,
        )

    validation = loader(sources.validation) if sources.validation else None
    return DataLoaders(loader(sources.training, dropout_bits=dropout), validation, fingerprint)
