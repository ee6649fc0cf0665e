"""The batches of a run: opens the data that a recipe names and shards each global batch over the data-parallel ranks."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import get_protocol_members

from titanlike.config import UserError
from titanlike.config.sections import Data, Training
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import BatchSource
from titanlike.data.batches.sources import Sources, open_sources
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.distributed import environment, process_group


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
    vocab_size: int | None = None,
    num_next_tokens: int = 0,
    open_sources: Callable[..., Sources] = open_sources,
) -> DataLoaders:
    """Opens the training and validation data. All ranks call it together, and fail if their data differ.

    Args:
        validate: whether to hold out or open validation data.
        dropout: whether batches carry random bits for dropout.
        position_ids: the positions of each sequence that this rank holds; see `context_position_ids`.
        vocab_size: vocabulary size of the model; data with other tokens is refused.
        num_next_tokens: further tokens that each position of the training data predicts: `model.num_mtp_layers`.
        open_sources: opens the data; replace it to read a dataset of your own.
    """
    parameters = inspect.signature(open_sources).parameters
    takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    if training.batch_ramp and not takes_any and "batch_ramp" not in parameters:
        raise UserError(
            "training.batch_ramp is set, but the data source of this program has batches of one size; give its open_sources the "
            "parameter batch_ramp, or remove the key"
        )
    ramp: dict[str, Any] = {"batch_ramp": training.batch_ramp} if training.batch_ramp else {}
    with process_group.waiting_for_all():  # text is tokenized on a machine whose cache does not have it
        sources = open_sources(
            section,
            tokenizer,
            seq_len=training.seq_len,
            global_batch_size=training.global_batch_size,
            seed=seed,
            validate=validate,
            **ramp,
        )
    _check_sources(sources, training.seq_len, validate)
    fingerprint = process_group.assert_equal_across_ranks("the data", sources.training.fingerprint)

    record = environment.batch_record_folder()

    def loader(source: BatchSource, kind: str, **others: Any) -> BatchLoader:
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
            vocab_size=vocab_size,
            record=Path(record, kind) if record else None,
            **others,
        )

    validation = loader(sources.validation, "validation") if sources.validation else None
    return DataLoaders(
        loader(sources.training, "training", dropout_bits=dropout, num_next_tokens=num_next_tokens, **ramp),
        validation,
        fingerprint,
    )


def _check_sources(sources: Sources, seq_len: int, validate: bool) -> None:
    """Raises `UserError` if the sources, which may be a user's own, cannot be used."""
    if validate and sources.validation is None:
        raise UserError(
            "validation.interval is set, but open_sources returns no source for validation; return one, or set "
            "validation.interval = 0"
        )
    if sources.validation is sources.training:
        raise UserError(
            "open_sources returns one object for training and validation; return two, each with its own position"
        )
    for source in filter(None, (sources.training, sources.validation)):
        missing = [name for name in get_protocol_members(BatchSource) if not hasattr(source, name)]
        if missing:
            raise UserError(
                f"the data source {type(source).__name__} lacks {', '.join(sorted(missing))}; see BatchSource"
            )
        if source.seq_len != seq_len:
            raise UserError(
                f"the data source {type(source).__name__} has seq_len = {source.seq_len}, but training.seq_len = {seq_len}; make "
                "them equal"
            )
    if not isinstance(sources.training.fingerprint, str) or not sources.training.fingerprint:
        raise UserError(
            f"the fingerprint of the data source {type(sources.training).__name__} must be a string that identifies the data, not "
            f"{sources.training.fingerprint!r}"
        )
