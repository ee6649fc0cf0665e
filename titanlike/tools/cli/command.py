"""How a command is registered, and what it refuses."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import nearest, shown

RECIPE_KEYS = r"--.+\..+|--recipe|--program"  # options that are keys of a recipe
ANY_KEYS = r"--.+"


def add_command(
    commands: Any,
    name: str,
    text: str,
    description: str,
    run: Callable[[argparse.Namespace], int | None],
    *,
    overrides: str = "",
) -> argparse.ArgumentParser:
    """Adds a command and returns its parser.

    Args:
        text: Its line in the list of commands.
        run: Runs it, and returns its exit code.
        overrides: The pattern of options beside its own, which `run` gets as `arguments.overrides`, with their values.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(run=run, parser=command, accepted=overrides)
    return command


def refuse_unknown(arguments: argparse.Namespace, others: Sequence[str]) -> None:
    """Raises `UserError` for arguments that neither the command nor a recipe has."""
    parser: argparse.ArgumentParser = arguments.parser
    options = [name for action in parser._actions for name in action.option_strings]
    for argument in others:
        name = argument.partition("=")[0]
        if argument.startswith("-") and not re.fullmatch(arguments.accepted, name):
            near = nearest(name, options)
            hint = f"did you mean {near}?" if near else f"see {parser.prog} --help"
            raise UserError(f"{shown(name)}: unknown option; {hint}")
        if not arguments.accepted:
            raise UserError(f"{shown(argument)}: {parser.prog} takes no such argument; see {parser.prog} --help")
