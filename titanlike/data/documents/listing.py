"""Lists the files of folders and patterns, local or at a URL. No torch."""

import glob
import json
import os
import re
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from titanlike.config import UserError
from titanlike.data.documents.data_files import File, is_address, local_file
from titanlike.data.documents.records import ARROW, PARQUET

DATASET_DICT, *DATASET_FILES = "dataset_dict.json", "dataset_info.json", "state.json"  # of `datasets.save_to_disk`
CACHED_BY_DATASETS = re.compile(r"cache-[0-9a-f]+(_[0-9]+_of_[0-9]+)?\.arrow$")  # results of `map`, beside the data


def list_files(path: str, key: str = "data.path") -> list[File]:
    """Lists the file, all files below the folder, or the files that match the pattern, sorted by name. Of a folder, hidden files
    are left out, and of a local one binary files too. `key` names the option in error messages."""
    if is_address(path):
        from titanlike.data.documents.remote import list_remote  # only remote files need it

        files = list_remote(path)
    else:
        files = list_local(path)
    if not files:
        raise UserError(f"{key} = {path!r}: no files found")
    return _data_files(files)


def _data_files(files: Sequence[File]) -> list[File]:
    """Leaves out what `datasets.save_to_disk` writes beside the data of a dataset, and what `datasets` caches there. Refuses a
    folder of several splits."""
    named = [(file.name.rpartition("/")[0], file.name.rpartition("/")[2]) for file in files]
    folders = {folder for folder, name in named if name.endswith(".arrow") and not CACHED_BY_DATASETS.match(name)}
    for parent in (folder for folder, name in named if name == DATASET_DICT):
        splits = sorted(folder.rpartition("/")[2] for folder in folders if folder.rpartition("/")[0] == parent)
        if len(splits) > 1:
            example = f"{parent}/{'train' if 'train' in splits else splits[0]}"
            raise UserError(f"{parent} has the splits {', '.join(splits)} of a dataset; give one of them: {example}")
    return [
        file
        for file, (folder, name) in zip(files, named, strict=True)
        if not (folder in folders and (name in DATASET_FILES or CACHED_BY_DATASETS.match(name)))
        and not (folders and name == DATASET_DICT)
    ]


def stdlib_files() -> list[File]:
    """Lists the source files of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]  # site-packages may have 100,000 files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [local_file(path) for path in sorted(paths)]


def list_local(pattern: str) -> list[File]:
    """Lists the file, all files below the folder, or the files that match the pattern."""
    if _has_shards(Path(pattern)):
        raise UserError(f"{pattern} has token shards, not text; a recipe reads it with data.source = 'shards'")
    try:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        files = [path for match in map(Path, matches) for path in (_files_below(match) if match.is_dir() else [match])]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return [local_file(path) for path in dict.fromkeys(files)]  # `**` matches a folder and what is in it


def _has_shards(folder: Path) -> bool:
    try:
        return "splits" in json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _files_below(root: Path) -> list[Path]:
    """Returns the files below a folder that are not hidden and not binary. Links to folders are followed, to each folder once."""

    def refuse(error: OSError) -> None:
        raise error

    found, seen = [], {root.resolve()}
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        names_of_folders = sorted((name for name in folders if not name.startswith(".")), reverse=True)
        below = {Path(folder, name).resolve(): name for name in names_of_folders}  # of two links, the first by name
        folders[:] = sorted(name for target, name in below.items() if target not in seen)
        seen.update(below)
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        # A broken link is listed, so that opening it reports an error.
        found += [path for path in paths if (path.is_file() or not path.exists()) and _is_text(path)]
    return sorted(found)


def _is_text(path: Path) -> bool:
    """Whether a file is, or contains, text: binary files, such as images, have a zero byte near their start."""
    if path.suffix in (".gz", ".zst", PARQUET, *ARROW):
        return True
    with suppress(OSError), path.open("rb") as file:
        return b"\0" not in file.read(8192)
    return True  # opening it later reports why it cannot be read
