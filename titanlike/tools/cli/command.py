"""How a command is registered, and what it refuses."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import nearest, shown

RECIPE_KEYS = r"--.+\..+|--recipe|--program"  # options that are keys of a recipe
ANY_KEYS = r"--.+"
OVERRIDE_TEXT = "--section.key=value overrides its keys"


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description but not its examples, and adds to an option's text what argparse knows of it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        return "\n\n".join(part if part.startswith(" ") else wrap(part, width, indent) for part in text.split("\n\n"))

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if isinstance(default, list) and action.option_strings:
            return f"{text}; can be repeated"
        if action.nargs == 0 or default in (None, "", []) or "(default: " in text:
            return text
        return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"


def add_command(
    commands: Any,
    name: str,
    description: str,
    run: Callable[[argparse.Namespace], int | None] | None = None,
    *,
    overrides: str = "",
) -> argparse.ArgumentParser:
    """Adds a command and returns its parser.

    Args:
        description: The text of --help, whose first sentence is also its line in the list of commands.
        run: Runs it, and returns its exit code. None: it has subcommands.
        overrides: The pattern of options beside its own, which `run` gets as `arguments.overrides`, with their values.
    """
    line = re.split(r"\.\s", description)[0].removesuffix(".")
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=line, description=description, formatter_class=HelpFormatter
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
