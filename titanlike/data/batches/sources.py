"""The data sources that a recipe names. Imports no torch, except to stream text."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from titanlike.config import UserError
from titanlike.config.layout import Ramp
from titanlike.config.sections import Data
from titanlike.data.batches.best_fit import BestFitDataset
from titanlike.data.batches.packed_dataset import BatchSource, PackedDataset, SequenceDataset, ShuffledMixture
from titanlike.data.batches.stream import Stream
from titanlike.data.documents.data_files import fingerprint_of, hash_of
from titanlike.data.documents.listing import list_files
from titanlike.data.tokens.cache import fields_of
from titanlike.data.tokens.datasets import open_training, open_validation, validation_split
from titanlike.data.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sources:
    """The data of a run."""

    training: BatchSource
    validation: BatchSource | None = None


def open_sources(
    section: Data,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    validate: bool,
    batch_ramp: Ramp = (),
) -> Sources:
    """Opens the training data and, with `validate`, the validation data. Text is tokenized first unless the cache has it."""
    mix = partial(ShuffledMixture, seed=seed, global_batch_size=global_batch_size)
    paths, weights = paths_and_weights(section)
    training: BatchSource
    validation: ShuffledMixture | None = None
    if section.source == "stream":
        files = [list_files(path) for path in paths]
        fingerprints = [fingerprint_of(each) for each in files]
        fingerprints += [tokenizer.fingerprint, section.text_field, section.prompt_field]
        fingerprint = hash_of([fingerprints, weights])
        training = Stream(
            files, weights, tokenizer, fields=fields_of(section), seq_len=seq_len, workers=section.workers,
            skip_bad=section.bad_records == "skip", seed=seed, global_batch_size=global_batch_size, batch_ramp=batch_ramp,
            fingerprint=fingerprint,
        )  # fmt: skip
    else:
        arrays = [open_training(section, path, tokenizer) for path in paths]
        splits = [validation_split(array) for array in arrays]
        every = 0 if section.validation_path or any(splits) else section.holdout_every
        pack = partial(_dataset(section, tokenizer, seq_len), holdout_every=every)
        training = mix(
            [pack(array, name=path) for array, path in zip(arrays, paths, strict=True)], weights, batch_ramp=batch_ramp
        )
        if validate and not section.validation_path:
            if not any(splits) and not every:
                raise UserError(
                    f"validation.interval is set, but {paths[0]} has no validation split, and data.holdout_every = 0; set "
                    "that, data.validation_path, or validation.interval = 0"
                )
            # Datasets of a mixture without a validation split are not validated.
            held_out = {
                (pack(split, name=f"{path} (validation)") if split else pack(array, held_out=True, name=path)): weight
                for array, split, path, weight in zip(arrays, splits, paths, weights, strict=True)
                if split or every
            }
            validation = mix(list(held_out), list(held_out.values()))
    if validate and section.validation_path:
        array = open_validation(section, tokenizer)
        validation = mix([_dataset(section, tokenizer, seq_len)(array, name=section.validation_path)])
    return Sources(training, validation)


def _dataset(section: Data, tokenizer: Tokenizer, seq_len: int) -> Callable[..., SequenceDataset]:
    """Returns what makes sequences of tokens."""
    if section.packing == "concatenate":
        return partial(PackedDataset, seq_len=seq_len)
    return partial(BestFitDataset, seq_len=seq_len, separator=tokenizer.separator, separate=section.document_masks)


def paths_and_weights(section: Data) -> tuple[list[str], list[float]]:
    """Returns the paths that a section names, or the name of a source without paths, and their weights in a mixture."""
    if not section.reads_paths:
        return [section.source], [1.0]
    if section.mixture:
        return list(section.mixture), list(section.weights or [1.0] * len(section.mixture))
    if not section.path:
        raise UserError(f"data.source = '{section.source}' requires data.path, which is empty; set it, or data.mixture")
    return [section.path], [1.0]
