"""The tokens that the section `data` of a recipe names: token shards, or text that is tokenized first. No torch."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Data
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.data.documents.data_files import is_address
from titanlike.data.documents.listing import list_files, stdlib_files
from titanlike.data.tokens.arrays import InMemoryTokens, TokenArray
from titanlike.data.tokens.cache import tokenized
from titanlike.data.tokens.shards import MANIFEST, TRAIN, VALIDATION, Shards, read_manifest
from titanlike.data.tokens.token_files import TokenFiles, find_token_files, is_token_file, open_shards
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.distributed.environment import is_first_on_node

SYNTHETIC_TOKENS = 4_000_000


def open_training(section: Data, path: str, tokenizer: Tokenizer) -> TokenArray:
    """Opens the tokens of `data.source` at one of its paths."""
    if section.source == "synthetic":
        drawn = np.random.default_rng(0).integers(0, tokenizer.vocab_size, SYNTHETIC_TOKENS, dtype=tokenizer.dtype)
        return InMemoryTokens(drawn)
    if section.source == "shards":
        return _open_checked(path, tokenizer)
    files = stdlib_files() if section.source == "python_stdlib" else list_files(path)
    return Shards(str(tokenized(files, section, tokenizer, path)), tokenizer=tokenizer)


def open_validation(section: Data, tokenizer: Tokenizer, *, splits: Sequence[str] = (VALIDATION,)) -> Shards:
    """Opens `data.validation_path`, which may name shards or text whatever `data.source` is. Of shards, it is the first of these
    splits that they have, or the training split."""
    path = section.validation_path
    if not has_tokens(section, path):
        return Shards(str(tokenized(list_files(path), section, tokenizer, path)), tokenizer=tokenizer)
    shards = _open_checked(path, tokenizer)
    split = next((split for split in splits if shards.manifest.splits.get(split)), TRAIN)
    return open_shards(path, split, tokenizer=tokenizer)


def validation_split(array: TokenArray) -> Shards | None:
    """Returns the validation split of shards that have one."""
    if isinstance(array, Shards) and array.manifest.splits.get(VALIDATION):
        return open_shards(array.path, VALIDATION, tokenizer=array.tokenizer)
    return None


def _open_checked(path: str, tokenizer: Tokenizer) -> Shards:
    """Opens the training split of shards of this tokenizer."""
    shards = open_shards(path, tokenizer=tokenizer)
    warning = _check_tokenizer(shards, tokenizer)
    if warning and is_first_on_node():
        print(f"warning: {path}: {warning}", file=sys.stderr, flush=True)
    return shards


def has_tokens(section: Data, path: str) -> bool:
    """Whether a path that may name text names tokens. Token files in a folder count if the training data are tokens, too."""
    if is_token_file(path) or (section.source == "shards" and find_token_files(path)):
        return True
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
        shards = open_shards(path, tokenizer=tokenizer)
        _check_tokenizer(shards, tokenizer)
        _ = shards.fingerprint  # reads samples


def _check_tokenizer(shards: Shards, tokenizer: Tokenizer) -> str:
    """Refuses tokens of another tokenizer. Returns a warning, or ""."""
    if isinstance(shards, TokenFiles):
        return shards.check_tokenizer(tokenizer)
    recorded = shards.manifest.tokenizer
    if recorded["fingerprint"] == tokenizer.fingerprint:
        return ""
    differing = [
        f"tokenizer.{key} = {json.dumps(recorded[key])}, not {json.dumps(getattr(tokenizer.section, key))}"
        for key in ("encoding", "special", "eos", "bos")
        if key in recorded and recorded[key] != getattr(tokenizer.section, key)
    ]
    raise UserError(
        f"{shards.path} was made with another tokenizer (fingerprint {recorded['fingerprint']}, this one "
        f"{tokenizer.fingerprint}): "
        + ("; ".join(differing) or "its file has changed; restore that file, or prepare the data again")
    )
