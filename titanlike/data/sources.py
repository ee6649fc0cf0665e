"""Where a run's tokens come from, as its recipe says. No torch."""

import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.sections import Data
from titanlike.data.packed_dataset import BatchSource, InMemoryTokens, PackedDataset, ShuffledMixture, TokenArray
from titanlike.data.prepare.prepare import prepare
from titanlike.data.stream import Stream
from titanlike.data.text.documents import Fields
from titanlike.data.text.files import File, is_address, list_files, local_file
from titanlike.data.text.tokenizer import Tokenizer, build_tokenizer
from titanlike.data.token_shards import MANIFEST, TRAIN, VALIDATION, Manifest, Shards, read_manifest
from titanlike.utils.file_lock import FileLock, LockHeld
from titanlike.utils.system import cache_folder

SYNTHETIC_TOKENS = 4_000_000  # enough that batches differ, made in a moment
MUCH_TEXT = 200_000_000  # bytes that one process makes into tokens in a minute or so


@dataclass(frozen=True)
class Sources:
    """What a run reads."""

    training: BatchSource
    validation: ShuffledMixture | None
    fingerprint: str  # tells this data from any other: saved with a run, and compared when it is resumed


def open_sources(
    section: Data,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    validate: bool,
    tell: Callable[[str], None] = print,
) -> Sources:
    """Open what the recipe names. Text that is made into tokens first may take a while, and `tell` is told."""
    shuffle = partial(ShuffledMixture, seed=seed, global_batch_size=global_batch_size)
    places, weights = places_of(section)
    held_out: ShuffledMixture | None = None
    prints: list[str]
    training: BatchSource
    if section.source == "stream":
        files = [list_files(place) for place in places]
        prints = [_print_of(each) for each in files] + [tokenizer.fingerprint, section.text_field, section.prompt_field]
        training = Stream(
            files, weights, tokenizer, fields=_fields(section), seq_len=seq_len, workers=section.workers,
            skip_bad=section.bad_records == "skip", seed=seed, global_batch_size=global_batch_size,
        )  # fmt: skip
    else:
        rows = [_row(section, place, tokenizer, TRAIN, tell) for place in places]
        prints = [row.fingerprint for row in rows]
        apart = [_validation_row(row) for row in rows]
        every = 0 if section.validation_path or any(apart) else section.holdout_every
        windows = [
            PackedDataset(row, seq_len, holdout_every=every, name=name) for row, name in zip(rows, places, strict=True)
        ]
        training = shuffle(windows, weights)
        if validate and not section.validation_path:
            if not any(apart) and not every:
                raise UserError(
                    f"validation.interval is set, but {places[0]} has no validation split, and data.holdout_every = 0; set "
                    "that, data.validation_path, or validation.interval = 0"
                )
            # Of a mixture, parts without a split of their own are not validated.
            parts = [
                (PackedDataset(own or row, seq_len, held_out=own is None, holdout_every=every, name=name), weight)
                for row, own, name, weight in zip(rows, apart, places, weights, strict=True)
                if own or every
            ]
            held_out = shuffle([part for part, _ in parts], [weight for _, weight in parts])
    if validate and section.validation_path:
        row = _row(section, section.validation_path, tokenizer, VALIDATION, tell)
        held_out = shuffle([PackedDataset(row, seq_len, name=section.validation_path)])
    if len(prints) > 1:
        prints = [hashlib.sha256(json.dumps([prints, weights]).encode()).hexdigest()[:16]]
    return Sources(training, held_out, prints[0])


def places_of(section: Data) -> tuple[list[str], list[float]]:
    """The paths or addresses that are read, and the share of each."""
    if section.mixture:
        return list(section.mixture), list(section.weights or [1.0] * len(section.mixture))
    return [section.path or section.source], [1.0]


def check_shards(place: str, recipe: PretrainRecipe) -> None:
    """Refuse shards that are here and are not whole, or not of the recipe's tokenizer."""
    if not is_address(place):
        Shards(place)
        _check_made_by(read_manifest(place), place, build_tokenizer(recipe.tokenizer, recipe.model.vocab_size))


def _check_made_by(manifest: Manifest, place: str, tokenizer: Tokenizer) -> None:
    made_by = manifest.tokenizer
    if made_by["fingerprint"] != tokenizer.fingerprint:
        keys = ("encoding", "special", "eos", "bos")
        differing = [
            f"tokenizer.{key} = {json.dumps(made_by[key])}, not {json.dumps(getattr(tokenizer.section, key))}"
            for key in keys
            if key in made_by and made_by[key] != getattr(tokenizer.section, key)
        ]
        raise UserError(
            f"{place} was made with another tokenizer (fingerprint {made_by['fingerprint']}, this one {tokenizer.fingerprint}): "
            + ("; ".join(differing) or "one of the same name; bring that file back, or prepare the data again")
        )


def _row(section: Data, place: str, tokenizer: Tokenizer, split: str, tell: Callable[[str], None]) -> TokenArray:
    """The tokens of one place. What is named for validation may be shards or text, whatever the training reads."""
    if section.source == "synthetic" and split == TRAIN:
        return _synthetic(tokenizer)
    named_apart = split == VALIDATION
    if _has_manifest(place) if named_apart else section.source == "shards":
        manifest = read_manifest(place)
        _check_made_by(manifest, place, tokenizer)
        # A folder that was prepared for validation alone has but one split.
        return Shards(place, VALIDATION if named_apart and manifest.splits.get(VALIDATION) else TRAIN)
    files = stdlib_files() if section.source == "python_stdlib" and not named_apart else list_files(place)
    return Shards(str(_prepared(files, section, tokenizer, place, tell)))


def _synthetic(tokenizer: Tokenizer) -> InMemoryTokens:
    drawn = np.random.default_rng(0).integers(0, tokenizer.vocab_size, SYNTHETIC_TOKENS, dtype=tokenizer.dtype)
    return InMemoryTokens(drawn)


def _has_manifest(place: str) -> bool:
    if not is_address(place):
        return Path(place, MANIFEST).exists()
    try:
        read_manifest(place)
    except UserError:
        return False
    return True


def _validation_row(row: TokenArray) -> TokenArray | None:
    """The split for validation, where the data has one."""
    apart = isinstance(row, Shards) and row.manifest.splits.get(VALIDATION)
    return Shards(row.path, VALIDATION) if isinstance(row, Shards) and apart else None


def _prepared(
    files: Sequence[File], section: Data, tokenizer: Tokenizer, place: str, tell: Callable[[str], None]
) -> Path:
    """Text made into shards in the cache, by the first of the processes that want it, or found there."""
    fields = _fields(section)
    known = [[file.name, file.size, file.version] for file in files]
    key = json.dumps([known, asdict(fields), section.bad_records, tokenizer.fingerprint])
    folder = cache_folder(section.cache) / "tokens"
    out = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    size = sum(file.size for file in files)
    try:
        while not (out / MANIFEST).exists():
            try:
                lock = FileLock(folder / f"{out.name}.lock")
            except LockHeld:
                time.sleep(0.1)
                continue
            try:
                if not (out / MANIFEST).exists():
                    if size > MUCH_TEXT:
                        tell(
                            f"{place}: {size / 2**30:.2f} GiB of text; `titanlike data prepare` uses every core, and once"
                        )
                    prepare(files, out, tokenizer.section, fields=fields, bad=section.bad_records, workers=0)
            finally:
                lock.release()
    except OSError as error:
        raise UserError(
            f"{folder} cannot hold the tokens of {place}: {error.strerror}; set data.cache to a folder"
        ) from None
    return out


def _fields(section: Data) -> Fields:
    return Fields(section.text_field, section.prompt_field)


def _print_of(files: Sequence[File]) -> str:
    """Tells files from others by their names and sizes: where they lie together does not matter."""
    names = [file.name.split("/") for file in files]
    same = next((n for n, parts in enumerate(zip(*names, strict=False)) if len(set(parts)) > 1), len(names[0]) - 1)
    known = [["/".join(name[same:]), file.size] for name, file in zip(names, files, strict=True)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def stdlib_files() -> list[File]:
    """The source of Python's own library."""
    root = Path(sysconfig.get_path("stdlib"))
    apart = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in apart]  # site-packages may have a hundred thousand files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [local_file(path) for path in sorted(paths)]
