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


def test_examples_keep_their_lines_and_prose_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    parser = argparse.ArgumentParser(
        "x", formatter_class=HelpFormatter, description=f"{'word ' * 30}.\n\n  x  {'y' * 90}"
    )
    parser.add_argument("--hours", type=float, default=24.0, metavar="H", help="duration")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="most items (default: all)")
    parser.add_argument("--name", action="append", default=[], metavar="NAME", help="name")
    lines = parser.format_help().splitlines()
    assert f"  x  {'y' * 90}" in lines
    assert all(len(line) < 60 for line in lines if "yyy" not in line)
    assert [line.split("  ")[-1] for line in lines[-3:]] == [
        "duration (default: 24)",
        "most items (default: all)",
        "name; can be repeated",
    ]
