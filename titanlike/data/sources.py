"""The data sources that a recipe names. Imports no torch, except to stream text."""

import json
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.layout import Ramp
from titanlike.config.sections import Data
from titanlike.data.packed_dataset import (
    BatchSource,
    InMemoryTokens,
    PackedDataset,
    ShuffledMixture,
    TokenArray,
    hash_of,
)
from titanlike.data.text.documents import Fields
from titanlike.data.text.files import DiskFull, File, is_address, list_files, local_file
from titanlike.data.text.tokenizer import Tokenizer, build_tokenizer
from titanlike.data.token_shards import FORMAT, MANIFEST, TRAIN, VALIDATION, Manifest, Shards, read_manifest
from titanlike.data.tokenization import write_shards
from titanlike.utils.file_lock import FileLock, LockHeld
from titanlike.utils.system import cache_folder

if TYPE_CHECKING:
    from titanlike.data.chats import TokenizedChats
    from titanlike.data.text.chat_template import ChatTemplate

T = TypeVar("T")

CHATS = ("chat", "synthetic_chat")
SYNTHETIC_TOKENS = 4_000_000
LARGE_TEXT = 200_000_000  # bytes that one process tokenizes in about a minute


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
    paths, weights = _paths_and_weights(section)
    training: BatchSource
    validation: ShuffledMixture | None = None
    if section.source in CHATS:
        return _open_chats(section, tokenizer, mix, seq_len=seq_len, validate=validate, batch_ramp=batch_ramp)
    if section.source == "stream":
        from titanlike.data.stream import Stream  # imports torch

        files = [list_files(path) for path in paths]
        fingerprints = [_fingerprint(each) for each in files]
        fingerprints += [tokenizer.fingerprint, section.text_field, section.prompt_field]
        fingerprint = hash_of([fingerprints, weights])
        training = Stream(
            files, weights, tokenizer, fields=_fields(section), seq_len=seq_len, workers=section.workers,
            skip_bad=section.bad_records == "skip", seed=seed, global_batch_size=global_batch_size, batch_ramp=batch_ramp,
            fingerprint=fingerprint,
        )  # fmt: skip
    else:
        arrays = [_open_training(section, path, tokenizer) for path in paths]
        splits = [_validation_split(array) for array in arrays]
        every = 0 if section.validation_path or any(splits) else section.holdout_every
        pack = partial(PackedDataset, seq_len=seq_len, holdout_every=every)
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
                pack(split or array, held_out=split is None, name=path): weight
                for array, split, path, weight in zip(arrays, splits, paths, weights, strict=True)
                if split or every
            }
            validation = mix(list(held_out), list(held_out.values()))
    if validate and section.validation_path:
        array = open_validation(section, tokenizer)
        validation = mix([PackedDataset(array, seq_len, name=section.validation_path)])
    return Sources(training, validation)


def _open_chats(
    section: Data,
    tokenizer: Tokenizer,
    mix: Callable[..., ShuffledMixture],
    *,
    seq_len: int,
    validate: bool,
    batch_ramp: Ramp,
) -> Sources:
    """Opens conversations. Those of a mixture are held out of each file or folder."""
    from titanlike.data.chats import PackedChats  # imports jinja2
    from titanlike.data.text.chat_template import build_chat_template

    paths, weights = _paths_and_weights(section)
    template = build_chat_template(section.chat_template, tokenizer)
    chats = [_tokenize_chats(section, path, template) for path in paths]
    every = 0 if section.validation_path else section.holdout_every
    pack = partial(PackedChats, tokenizer=tokenizer, seq_len=seq_len, too_long=section.long_chats)
    training = mix(
        [pack(each, holdout_every=every, name=path) for each, path in zip(chats, paths, strict=True)],
        weights,
        batch_ramp=batch_ramp,
    )
    if not validate:
        return Sources(training)
    if section.validation_path:
        path = section.validation_path
        return Sources(training, mix([pack(_tokenize_chats(section, path, template), name=path)]))
    held_out = [
        pack(each, holdout_every=every, held_out=True, name=path) for each, path in zip(chats, paths, strict=True)
    ]
    return Sources(training, mix(held_out, weights))


def _tokenize_chats(section: Data, path: str, template: "ChatTemplate") -> "TokenizedChats":
    from titanlike.data import chats
    from titanlike.data.text.conversations import synthetic_conversations

    if path == "synthetic_chat":
        return chats.tokenize(synthetic_conversations(), template)
    files = list_files(path)
    key = hash_of(
        [chats.FORMAT, _versions(files), template.identity, section.bad_records, template.tokenizer.fingerprint]
    )
    file = cache_folder(section.cache) / "chats" / f"{key}.npz"

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        chats.tokenize_files(files, template, skip_bad=section.bad_records == "skip").save(file)

    return _cache(file, path, write, lambda: chats.TokenizedChats.load(file))


def check_shards(path: str, recipe: PretrainRecipe) -> None:
    """Refuses local shards that are incomplete or belong to another tokenizer."""
    if not is_address(path):
        tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size)
        _check_tokenizer(path, read_manifest(path), tokenizer)
        _ = Shards(path, vocab_size=tokenizer.vocab_size).fingerprint  # reads samples


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
    if section.source in ("python_stdlib", "synthetic", "synthetic_chat"):
        return [section.source], [1.0]
    if not section.path:
        raise UserError(f"data.source = '{section.source}' requires data.path, which is empty; set it, or data.mixture")
    return [section.path], [1.0]


def _open_training(section: Data, path: str, tokenizer: Tokenizer) -> TokenArray:
    if section.source == "synthetic":
        drawn = np.random.default_rng(0).integers(0, tokenizer.vocab_size, SYNTHETIC_TOKENS, dtype=tokenizer.dtype)
        return InMemoryTokens(drawn)
    if section.source == "shards":
        _check_tokenizer(path, read_manifest(path), tokenizer)
        return Shards(path, vocab_size=tokenizer.vocab_size)
    files = stdlib_files() if section.source == "python_stdlib" else list_files(path)
    return Shards(str(_tokenize(files, section, tokenizer, path)), vocab_size=tokenizer.vocab_size)


def open_validation(section: Data, tokenizer: Tokenizer) -> Shards:
    """Opens `data.validation_path`, which may name shards or text whatever `data.source` is."""
    path = section.validation_path
    if not _has_manifest(path):
        return Shards(str(_tokenize(list_files(path), section, tokenizer, path)), vocab_size=tokenizer.vocab_size)
    manifest = read_manifest(path)
    _check_tokenizer(path, manifest, tokenizer)
    split = VALIDATION if manifest.splits.get(VALIDATION) else TRAIN
    return Shards(path, split, vocab_size=tokenizer.vocab_size)


def _validation_split(array: TokenArray) -> Shards | None:
    if isinstance(array, Shards) and array.manifest.splits.get(VALIDATION):
        return Shards(array.path, VALIDATION, vocab_size=array.vocab_size)
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
    folder = cache_folder(section.cache) / "tokens"
    out = folder / hash_of([FORMAT, _versions(files), asdict(fields), section.bad_records, tokenizer.fingerprint])

    def write() -> None:
        size = sum(file.size for file in files)
        if size > LARGE_TEXT:
            print(f"{path}: {size / 2**30:.2f} GiB of text; `titanlike data prepare` would use all cores, once")
        write_shards(files, out, tokenizer, fields, skip_bad_records=section.bad_records == "skip")

    return _cache(out, path, write, lambda: out if (out / MANIFEST).exists() else None)


def _cache(out: Path, path: str, write: Callable[[], None], load: Callable[[], T | None]) -> T:
    """Returns tokens from the cache. The first process that needs them writes them; the others wait until they can be loaded."""
    try:
        while (found := load()) is None:
            try:
                lock = FileLock(out.parent / f"{out.name}.lock")
            except LockHeld:
                time.sleep(0.1)
                continue
            try:
                if load() is None:
                    write()
            finally:
                lock.release()
        return found
    except DiskFull as error:
        raise UserError(f"{error}; free some space, or set data.cache to a folder on another disk") from None
    except OSError as error:
        raise UserError(
            f"{out.parent} cannot store the tokens of {path}: {error.strerror}; set data.cache to a writable folder"
        ) from None


def _versions(files: Sequence[File]) -> list[Any]:
    return [[file.name, file.size, file.version] for file in files]


def _fields(section: Data) -> Fields:
    return Fields(section.text_field, section.prompt_field)


def _fingerprint(files: Sequence[File]) -> str:
    """Identifies files by size and name below their common folder, so that the folder may move."""
    names = [file.name.split("/") for file in files]
    same = next((n for n, parts in enumerate(zip(*names, strict=False)) if len(set(parts)) > 1), len(names[0]) - 1)
    return hash_of([["/".join(name[same:]), file.size] for name, file in zip(names, files, strict=True)])


def stdlib_files() -> list[File]:
    """Lists the source files of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]  # site-packages may have 100,000 files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [local_file(path) for path in sorted(paths)]
