"""Files of local folders and patterns. No torch."""

import glob
import json
import os
from contextlib import suppress
from pathlib import Path

from titanlike.config import UserError
from titanlike.data.documents.files import File, local_file
from titanlike.data.documents.records import ARROW, PARQUET


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
