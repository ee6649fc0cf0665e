"""The texts of --help of every command."""

import argparse
from collections.abc import Iterator

import pytest

from titanlike.tools.cli.command import HelpFormatter
from titanlike.tools.cli.main import build_parser


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


COMMANDS = [command for command in commands(build_parser()) if command.formatter_class is HelpFormatter]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.prog)
def test_help_says_what_each_argument_is_and_its_default_once(
    command: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command.description and command.description.split(" ")[0].endswith("s")  # "Writes ..."
    prose = [part for part in command.description.split("\n\n") if not part.startswith(" ")]
    assert all("".join(part.split()) in "".join(command.format_help().split()) for part in prose)
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        text = HelpFormatter(command.prog)._expand_help(action)
        assert action.help and text[0] not in "(" and not text.endswith("."), action.dest
        assert text.count("default: ") <= 1 and text.count("can be repeated") <= 1, text
        assert action.option_strings or action.metavar, f"{action.dest} has no placeholder"
