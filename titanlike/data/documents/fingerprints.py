"""Identifies values and files, for caches and resumes. No torch."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from titanlike.data.documents.files import File


def hash_of(values: object) -> str:
    """Returns a fingerprint of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def versions_of(files: Sequence[File]) -> list[Any]:
    """Returns what differs after a change of the files on this machine."""
    return [[file.name, file.size, file.version] for file in files]


def fingerprint_of(files: Sequence[File]) -> str:
    """Identifies files by size and name below their common folder, so that the folder may move."""
    names = [file.name.split("/") for file in files]
    same = next((n for n, parts in enumerate(zip(*names, strict=False)) if len(set(parts)) > 1), len(names[0]) - 1)
    return hash_of([["/".join(name[same:]), file.size] for name, file in zip(names, files, strict=True)])
