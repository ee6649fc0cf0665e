"""Files and folders that commands write: none is replaced, and an error of the system becomes one sentence."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.utils.atomic_write import atomic_write_text


def refuse_existing(path: Path) -> None:
    """Raises `UserError` if there is something at a path."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists; choose another name, or remove it")


def check_path(path: Path, suffix: str, option: str) -> None:
    """Raises `UserError` if a file with this suffix cannot be at a path, which `option` names."""
    if path.suffix != suffix:
        raise UserError(f"{option} {shown(str(path))}: give the name of a {suffix} file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {shown(str(path))}: directory {shown(str(path.parent))} does not exist")


@contextmanager
def writing(path: Path, option: str = "") -> Iterator[None]:
    """Turns an `OSError` into a `UserError`. `option` names what the user gave the path with."""
    try:
        yield
    except OSError as error:
        name = f"{option} {path}".strip()
        raise UserError(f"{name} cannot be written: {error.strerror}; choose another path") from None


def write_text(path: Path, text: str, option: str = "") -> None:
    """Writes a file atomically. Raises `UserError` if it cannot be written."""
    with writing(path, option):
        atomic_write_text(path, text)
