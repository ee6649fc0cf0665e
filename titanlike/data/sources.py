"""The data sources that a recipe names. Imports no torch, except to stream text."""

import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.sections import Data
from titanlike.data.packed_dataset import BatchSource, InMemoryTokens, PackedDataset, ShuffledMixture, TokenArray
from titanlike.data.prepare.prepare import prepare
from titanlike.data.text.documents import Fields
from titanlike.data.text.files import File, is_address, list_files, local_file
from titanlike.data.text.tokenizer import Tokenizer, build_tokenizer
from titanlike.data.token_shards import FORMAT, MANIFEST, TRAIN, VALIDATION, Manifest, Shards, read_manifest
from titanlike.utils.file_lock import FileLock, LockHeld
from titanlike.utils.system import cache_folder

SYNTHETIC_TOKENS = 4_000_000
LARGE_TEXT = 200_000_000  # bytes that one process tokenizes in about a minute


@dataclass(frozen=True)
class Sources:
    """The data of a run."""

    training: BatchSource
    validation: ShuffledMixture | None
    fingerprint: str  # identifies the training data; a resume compares it with the checkpoint's


def open_sources(
    section: Data, tokenizer: Tokenizer, *, seq_len: int, global_batch_size: int, seed: int, validate: bool
) -> Sources:
    """Opens the training data and, with `validate`, the validation data. Text is tokenized first unless the cache has it."""
    mix = partial(ShuffledMixture, seed=seed, global_batch_size=global_batch_size)
    paths, weights = _paths_and_weights(section)
    training: BatchSource
    validation: ShuffledMixture | None = None
    if section.source == "stream":
        from titanlike.data.stream import Stream  # imports torch

        files = [list_files(path) for path in paths]
        fingerprints = [_fingerprint(each) for each in files]
        fingerprints += [tokenizer.fingerprint, section.text_field, section.prompt_field]
        training = Stream(
            files, weights, tokenizer, fields=_fields(section), seq_len=seq_len, workers=section.workers,
            skip_bad=section.bad_records == "skip", seed=seed, global_batch_size=global_batch_size,
        )  # fmt: skip
    else:
        arrays = [_open_training(section, path, tokenizer) for path in paths]
        fingerprints = [array.fingerprint for array in arrays]
        splits = [_validation_split(array) for array in arrays]
        every = 0 if section.validation_path or any(splits) else section.holdout_every
        pack = partial(PackedDataset, seq_len=seq_len, holdout_every=every)
        training = mix([pack(array, name=path) for array, path in zip(arrays, paths, strict=True)], weights)
        if validate and not section.validation_path:
            if not any(splits) and not every:
                raise UserError(
                    f"validation.interval is set, but {paths[0]} has no validation split, and data.holdout_every = 0; set "
                    "that, data.validation_path, or validation.interval = 0"
                )
            # Datasets of a mixture without a validation split are not validated.
            held_out = {
                pack(split or array, held_out=split is None, name=path): weight
                for array, split, path, weight in zip(arrays, splits, paths, weights, strict=True)
                if split or every
            }
            validation = mix(list(held_out), list(held_out.values()))
    if validate and section.validation_path:
        array = _open_validation(section, tokenizer)
        validation = mix([PackedDataset(array, seq_len, name=section.validation_path)])
    if len(fingerprints) > 1:
        fingerprints = [_hash([fingerprints, weights])]
    return Sources(training, validation, fingerprints[0])


def check_shards(path: str, recipe: PretrainRecipe) -> None:
    """Refuses local shards that are incomplete or belong to another tokenizer."""
    if not is_address(path):
        manifest = Shards(path).manifest
        _check_tokenizer(path, manifest, build_tokenizer(recipe.tokenizer, recipe.model.vocab_size))


def _check_tokenizer(path: str, manifest: Manifest, tokenizer: Tokenizer) -> None:
    recorded = manifest.tokenizer
    if recorded["fingerprint"] == tokenizer.fingerprint:
        return
    differing = [
        f"tokenizer.{key} = {json.dumps(recorded[key])}, not {json.dumps(getattr(tokenizer.section, key))}"
        for key in ("encoding", "special", "eos", "bos")
        if key in recorded and recorded[key] != getattr(tokenizer.section, key)
    ]
    raise UserError(
        f"{path} was made with another tokenizer (fingerprint {recorded['fingerprint']}, this one "
        f"{tokenizer.fingerprint}): "
        + ("; ".join(differing) or "its file has changed; restore that file, or prepare the data again")
    )


def _paths_and_weights(section: Data) -> tuple[list[str], list[float]]:
    if section.mixture:
        return list(section.mixture), list(section.weights or [1.0] * len(section.mixture))
    return [section.path or section.source], [1.0]


def _open_training(section: Data, path: str, tokenizer: Tokenizer) -> TokenArray:
    if section.source == "synthetic":
        drawn = np.random.default_rng(0).integers(0, tokenizer.vocab_size, SYNTHETIC_TOKENS, dtype=tokenizer.dtype)
        return InMemoryTokens(drawn)
    if section.source == "shards":
        _check_tokenizer(path, read_manifest(path), tokenizer)
        return Shards(path)
    files = stdlib_files() if section.source == "python_stdlib" else list_files(path)
    return Shards(str(_tokenize(files, section, tokenizer, path)))


def _open_validation(section: Data, tokenizer: Tokenizer) -> TokenArray:
    """Opens `data.validation_path`, which may name shards or text whatever `data.source` is."""
    path = section.validation_path
    if not _has_manifest(path):
        return Shards(str(_tokenize(list_files(path), section, tokenizer, path)))
    manifest = read_manifest(path)
    _check_tokenizer(path, manifest, tokenizer)
    return Shards(path, VALIDATION if manifest.splits.get(VALIDATION) else TRAIN)


def _validation_split(array: TokenArray) -> Shards | None:
    if isinstance(array, Shards) and array.manifest.splits.get(VALIDATION):
        return Shards(array.path, VALIDATION)
    return None


def _has_manifest(path: str) -> bool:
    if not is_address(path):
        return Path(path, MANIFEST).exists()
    try:
        return bool(read_manifest(path))
    except UserError:
        return False


def _tokenize(files: Sequence[File], section: Data, tokenizer: Tokenizer, path: str) -> Path:
    """Returns the shards of some text in the cache. The first process that needs them writes them; the others wait."""
    fields = _fields(section)
    known = [[file.name, file.size, file.version] for file in files]
    folder = cache_folder(section.cache) / "tokens"
    out = folder / _hash([FORMAT, known, asdict(fields), section.bad_records, tokenizer.fingerprint])
    try:
        while not (out / MANIFEST).exists():
            try:
                lock = FileLock(folder / f"{out.name}.lock")
            except LockHeld:
                time.sleep(0.1)
                continue
            try:
                if not (out / MANIFEST).exists():
                    size = sum(file.size for file in files)
                    if size > LARGE_TEXT:
                        print(
                            f"{path}: {size / 2**30:.2f} GiB of text; `titanlike data prepare` would use all cores, once"
                        )
                    prepare(files, out, tokenizer.section, fields=fields, bad=section.bad_records, workers=0)
            finally:
                lock.release()
    except OSError as error:
        raise UserError(
            f"{folder} cannot store the tokens of {path}: {error.strerror}; set data.cache to a writable folder"
        ) from None
    return out


def _fields(section: Data) -> Fields:
    return Fields(section.text_field, section.prompt_field)


def _hash(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _fingerprint(files: Sequence[File]) -> str:
    """Identifies files by size and name below their common folder, so that the folder may move."""
    names = [file.name.split("/") for file in files]
    same = next((n for n, parts in enumerate(zip(*names, strict=False)) if len(set(parts)) > 1), len(names[0]) - 1)
    return _hash([["/".join(name[same:]), file.size] for name, file in zip(names, files, strict=True)])


def stdlib_files() -> list[File]:
    """Lists the source files of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]  # site-packages may have 100,000 files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [local_file(path) for path in sorted(paths)]
