"""A filter of one's own: a function in a Python file, which says whether a document is kept, or returns another text for it."""

import hashlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from titanlike.config import UserError
from titanlike.data.documents.readers import replace_surrogates


@dataclass(frozen=True)
class OwnFilter:
    """A function that is named `FILE.py:FUNCTION`, and the content of its file when the command started."""

    name: str
    source: bytes

    @property
    def fingerprint(self) -> str:
        """Identifies the content of the file."""
        return hashlib.sha256(self.source).hexdigest()[:16]

    @property
    def takes_record(self) -> bool:
        """Whether the function takes the complete record: its first parameter is called `record`."""
        return _load(self)[1]

    def apply(self, text: str, record: dict[str, Any]) -> str | None:
        """Returns the text of a document that is kept, and None for one that is removed."""
        function, takes_record = _load(self)
        try:
            result = function(record if takes_record else text)
        except (Exception, SystemExit) as error:
            raise UserError(f"--filter {self.name} raised {type(error).__name__}: {error}") from error
        if isinstance(result, str):
            return replace_surrogates(result) or None
        if isinstance(result, (bool, np.bool_)):
            return text if result else None
        raise UserError(
            f"--filter {self.name} returned {type(result).__name__}; return True to keep the document, False to remove it, or its "
            "new text"
        )


def open_filter(name: str) -> OwnFilter:
    """Checks a name `FILE.py:FUNCTION` and returns its filter."""
    file, separator, function = name.rpartition(":")
    if not separator or not file.endswith(".py") or not function.isidentifier():
        raise UserError(f"--filter {name}: give a file and a function, such as my_filter.py:keep")
    try:
        own = OwnFilter(name, Path(file).read_bytes())
    except OSError as error:
        raise UserError(f"--filter {name}: {file} cannot be read: {error.strerror}") from None
    _load(own)
    return own


@lru_cache(maxsize=1)
def _load(own: OwnFilter) -> tuple[Callable[[Any], Any], bool]:
    file, _, name = own.name.rpartition(":")
    module = sys.modules["<filter>"] = ModuleType("<filter>")  # where dataclasses look up their annotations
    names = vars(module)
    try:
        exec(compile(own.source, file, "exec"), names)
    except (Exception, SystemExit) as error:
        raise UserError(f"--filter {own.name}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    function = names.get(name)
    if not callable(function):
        functions = ", ".join(each for each, value in names.items() if inspect.isfunction(value)) or "none"
        raise UserError(f"--filter {own.name}: {file} has no function {name!r}; its functions: {functions}")
    return function, [*inspect.signature(function).parameters][:1] == ["record"]
