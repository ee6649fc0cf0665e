"""Where tokens come from: Python's own library, text files, or random numbers."""

import glob
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.config.sections import Data
from titanlike.data.tokenizer import Tokenizer

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

SYNTHETIC_TOKENS = 4_000_000  # enough that batches differ, made in a moment


def load_tokens(section: Data, tokenizer: Tokenizer) -> Tokens:
    """All tokens of the source in one row, each document closed by the end-of-text token."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    if section.source == "synthetic":
        return np.random.default_rng(0).integers(0, tokenizer.vocab_size, SYNTHETIC_TOKENS).astype(dtype)
    paths = _stdlib_files() if section.source == "python_stdlib" else _text_files(section.path)
    pieces = []
    for text in _texts(paths):
        pieces.append(tokenizer.encode(text).astype(dtype))
        pieces.append(np.array([tokenizer.end_of_text], dtype))
    if not pieces:
        raise UserError(f"data.path = {section.path!r} has no text: every file that it names is empty")
    return np.concatenate(pieces)


def fingerprint(tokens: Tokens) -> str:
    """What tells this data from any other: saved with a run, and compared when it is resumed."""
    return hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()[:16]


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    apart = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if not apart & set(path.relative_to(root).parts))


def _text_files(pattern: str) -> list[Path]:
    found = []
    for match in [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern)):
        path = Path(match)
        found += sorted(file for file in path.rglob("*") if not file.is_dir()) if path.is_dir() else [path]
    if not found:
        raise UserError(f"data.path = {pattern!r}: there is no file to read")
    return found


def _texts(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start} is not UTF-8; convert the file, or leave it out") from None
        if text:
            yield text
