"""Argument types for argparse."""

import argparse
import re
from pathlib import Path

from titanlike.config.base import shown
from titanlike.utils.arguments import parse_int


def positive_int(text: str) -> int:
    """Parses an integer of at least 1."""
    return _at_least(1, text)


def non_negative_int(text: str) -> int:
    """Parses an integer of at least 0."""
    return _at_least(0, text)


def _at_least(minimum: int, text: str) -> int:
    number = parse_int(text)
    if number is None or number < minimum:
        limit = " and below 10^9" if text.isdigit() and number is None else ""
        raise argparse.ArgumentTypeError(f"expected an integer of at least {minimum}{limit}, got {shown(text)!r}")
    return number


def local_path(text: str) -> Path:
    """Parses the path of a file or folder to write, which is not the URL of an object store."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"expected a local path, got {shown(text)!r}; copy the result there afterwards"
        )
    return Path(text)


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that read a shell script, which they run with bash."""
    text = "variable of the environment of a script"
    parser.add_argument("--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "run a script even if this machine's kernel cannot keep it from writing files (Landlock)"
    parser.add_argument("--trust", action="store_true", help=text)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name) or not value.isprintable():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {shown(text)!r}")
    return name, value
