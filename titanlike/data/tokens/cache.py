"""Text that is tokenized once, at the first start that needs it, and cached. No torch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Data
from titanlike.data.documents.data_files import DiskFull, File, convert_write_errors, hash_of, versions_of
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.shards import FORMAT, MANIFEST
from titanlike.data.tokens.tokenization import Options, finish, tokenize
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.data.tokens.work_units import read_result, remove_results, split_work_units, write_result
from titanlike.distributed.environment import is_first_on_node
from titanlike.utils.file_lock import FileLock, LockHeld
from titanlike.utils.system import cache_folder

T = TypeVar("T")

LARGE_TEXT = 200_000_000  # bytes that one process tokenizes in a minute or less


def fields_of(section: Data) -> Fields:
    """Returns the fields of a record that a section names."""
    return Fields(section.text_field, section.prompt_field)


def tokenized(files: Sequence[File], section: Data, tokenizer: Tokenizer, path: str) -> Path:
    """Returns the shards of some text in the cache. The first process that needs them writes them; the others wait."""
    fields = fields_of(section)
    folder = cache_folder(section.cache) / "tokens"
    out = folder / hash_of([FORMAT, versions_of(files), asdict(fields), section.bad_records, tokenizer.fingerprint])

    def write() -> None:
        size = sum(file.size for file in files)
        if size > LARGE_TEXT:
            print(f"{path}: {size / 2**30:.2f} GiB of text; `titanlike data prepare` would use all cores, once")
        write_shards(files, out, tokenizer, fields, skip_bad_records=section.bad_records == "skip")

    return cached(out, path, write, lambda: out if (out / MANIFEST).exists() else None)


def write_shards(
    files: Sequence[File], folder: Path, tokenizer: Tokenizer, fields: Fields, *, skip_bad_records: bool
) -> None:
    """Tokenizes files into a new folder of token shards. It gets its name when it is complete. After an interruption, the same call
    resumes with the work units that are not finished."""
    units = split_work_units(files, count=1)  # as few shards as possible
    spans = [[(span.file.name, span.bounds) for span in unit.spans] for unit in units]
    partial = folder.with_name(f"{folder.name}-{hash_of(spans)}.partial")
    with convert_write_errors(folder):
        partial.mkdir(parents=True, exist_ok=True)
        found = [read_result(partial, unit.number, np.dtype(tokenizer.dtype).itemsize) for unit in units]
        remaining = [unit for unit, result in zip(units, found, strict=True) if result is None]
        options = Options(partial, tokenizer.section, fields, 0.0, skip_bad_records)
        for unit in remaining:
            result = found[unit.number] = tokenize(unit, options, tokenizer, lambda *_: None)
            result.hashes = None
            write_result(result, partial)
        finish(partial, folder, [result for result in found if result], tokenizer, options, files)
        remove_results(folder)


def cached(out: Path, path: str, write: Callable[[], None], load: Callable[[], T | None]) -> T:
    """Returns tokens from the cache. The first process that needs them writes them (without locks, the first one of a node); the
    others wait until they can be loaded."""
    try:
        while (found := load()) is None:
            try:
                lock = FileLock(out.parent / f"{out.name}.lock")
            except LockHeld:
                time.sleep(0.1)
                continue
            try:
                if not lock.is_supported and not is_first_on_node():
                    time.sleep(1.0)
                elif load() is None:
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
