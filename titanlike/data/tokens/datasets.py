"""The tokens that the section `data` of a recipe names: token shards, or text that is tokenized first. No torch."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Data
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.data.documents.files import is_address, list_files, stdlib_files
from titanlike.data.tokens.arrays import InMemoryTokens, TokenArray
from titanlike.data.tokens.shards import MANIFEST, TRAIN, VALIDATION, Manifest, Shards, read_manifest
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer

SYNTHETIC_TOKENS = 4_000_000


def open_training(section: Data, path: str, tokenizer: Tokenizer) -> TokenArray:
    """Opens the tokens of `data.source` at one of its paths."""
    if section.source == "synthetic":
        drawn = np.random.default_rng(0).integers(0, tokenizer.vocab_size, SYNTHETIC_TOKENS, dtype=tokenizer.dtype)
        return InMemoryTokens(drawn)
    if section.source == "shards":
        _check_tokenizer(path, read_manifest(path), tokenizer)
        return Shards(path, tokenizer=tokenizer)
    from titanlike.data.tokens.cache import tokenized  # only a run of text needs it

    files = stdlib_files() if section.source == "python_stdlib" else list_files(path)
    return Shards(str(tokenized(files, section, tokenizer, path)), tokenizer=tokenizer)


def open_validation(section: Data, tokenizer: Tokenizer, *, splits: Sequence[str] = (VALIDATION,)) -> Shards:
    """Opens `data.validation_path`, which may name shards or text whatever `data.source` is. Of shards, it is the first of these
    splits that they have, or the training split."""
    path = section.validation_path
    if not _has_manifest(path):
        from titanlike.data.tokens.cache import tokenized

        return Shards(str(tokenized(list_files(path), section, tokenizer, path)), tokenizer=tokenizer)
    manifest = read_manifest(path)
    _check_tokenizer(path, manifest, tokenizer)
    split = next((split for split in splits if manifest.splits.get(split)), TRAIN)
    return Shards(path, split, tokenizer=tokenizer)


def validation_split(array: TokenArray) -> Shards | None:
    """Returns the validation split of shards that have one."""
    if isinstance(array, Shards) and array.manifest.splits.get(VALIDATION):
        return Shards(array.path, VALIDATION, tokenizer=array.tokenizer)
    return None


def _has_manifest(path: str) -> bool:
    if not is_address(path):
        return Path(path, MANIFEST).exists()
    try:
        return bool(read_manifest(path))
    except UserError:
        return False


def check_shards(path: str, section: TokenizerSection, vocab_size: int, weights: str) -> None:
    """Refuses local shards that are incomplete or belong to another tokenizer."""
    if not is_address(path):
        tokenizer = build_tokenizer(section, vocab_size, weights)
        _check_tokenizer(path, read_manifest(path), tokenizer)
        _ = Shards(path, tokenizer=tokenizer).fingerprint  # reads samples


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
