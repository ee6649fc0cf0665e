"""The arguments of a command line: numbers, and text that cannot be used."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlike.config.base import UserError, has_control_characters, shown


def parse_int(text: str) -> int | None:
    """Returns an integer of at most nine decimal digits, or None: `int` also accepts other scripts, spaces and underscores."""
    return int(text) if re.fullmatch("-?[0-9]{1,9}", text) else None


def refuse_undecodable(argv: Sequence[str]) -> None:
    """Raises `UserError` for an argument with bytes that are not text: they could not be printed or written to a recipe."""
    for argument in argv:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            name, _, value = argument.partition("=")
            text = f"{name}: {value!r}" if value and name.isprintable() else repr(argument)
            raise UserError(f"{shown(text)} is not text in this terminal's encoding")


def refuse_control_characters(arguments: Mapping[str, Any]) -> None:
    """Raises `UserError` for the text of an argument that a generated file or a printed command could not contain."""
    for name, value in arguments.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str | Path) and has_control_characters(str(text)):
                raise UserError(f"{name}: '{shown(str(text))}' contains control characters; remove them")
