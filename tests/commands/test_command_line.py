"""The commands of `titanlike`: their help, what they import, names of shipped recipes, and the command that messages name."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import ROOT, Cli
from titanlike.config.shipped import REPOSITORY, recipe_path, shipped_recipes, train_command
from titanlike.recipe import load
from titanlike.run.start import program_of
from titanlike.tools.cli.command import HelpFormatter
from titanlike.tools.cli.main import build_parser
from titanlike.tools.programs import SHIPPED


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


# One interpreter runs commands that are to answer at once.
PROGRAM = """
import sys
from titanlike.tools.cli.main import main

for words in {commands}:
    sys.argv = ["titanlike", *words]
    try:
        main()
    except SystemExit as end:
        print(f"exit code {{end.code or 0}}")
    imported = sorted({{"torch", "matplotlib"}} & sys.modules.keys())
    print(f"imported {{imported}} after {{words}}")
"""


def test_help_errors_checks_plans_and_comparisons_import_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record = {"step": 1, "loss": 4.0, "tokens": 100, "elapsed_seconds": 2.0}
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(record) + "\n")
    recipe = str(ROOT / "train_configs/llama3_8b.toml")
    commands = [
        ["train", "--help"],
        ["train", "--training.stepz=3"],
        ["train", recipe, "--check", "64", "--metrics.hardware", "h200"],
        ["plan", recipe, "--gpus=8"],
        ["compare", "run", "--html", "a.html"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(commands=commands)], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    imported = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert imported == [f"imported [] after {words}" for words in commands]
    assert "usage: titanlike train " in done.stdout
    assert "training.stepz = 3: unknown key" in done.stderr
    # The check also prints the plan.
    assert "valid for 64 processes" in done.stdout
    assert "\non 64 x H200" in done.stdout
    assert "peak, reserved" in done.stdout
    assert (tmp_path / "a.html").exists()


@pytest.mark.parametrize("name", ["debug", "finetune_debug", "llama3_8b_float8", "study/float8"])
def test_a_copy_is_the_same_recipe_with_a_program_of_its_own(name: str, tmp_path: Path, cli: Cli) -> None:
    cli("recipes", "copy", name, tmp_path / "my")
    shipped = recipe_path(name)
    copied = tmp_path / "my" / shipped.name
    assert program_of(copied) == copied.with_suffix(".py")
    assert program_of(copied).read_text() == program_of(shipped).read_text()
    recipe_type = SHIPPED[program_of(shipped)]
    expected = dataclasses.replace(load(recipe_type, shipped), program=copied.stem)
    assert load(recipe_type, copied) == expected
    assert copied.read_text().startswith("# ")  # the comment, without the path of the schema


def test_a_copy_replaces_no_file(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "mine.py").write_text("mine")
    for name, path, message in (
        ("debug", "mine.toml", f"{tmp_path}/mine.py exists; choose another name"),
        ("debug", "mine.txt", "mine.txt: give a folder, or the file of a recipe, which ends in .toml"),
        ("debgu", ".", "debgu is not a shipped recipe; did you mean debug?"),
    ):
        assert message in cli("recipes", "copy", name, tmp_path / path, code=2).err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "mine"


def test_a_misspelled_command_is_compared_with_the_commands(cli: Cli) -> None:
    assert "error: trian is not a command; did you mean titanlike train?" in cli("trian", code=2).err
    assert "choose from" in cli("xxxx", code=2).err


def test_the_list_has_a_line_for_each_recipe(cli: Cli) -> None:
    lines = cli("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    programs = ("pretrain", "mlm", "seq2seq", "finetune", "dpo", "distill")
    assert all(line.split()[1] in programs and line.endswith(".") for line in lines)


def test_messages_name_the_command_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert train_command() == "./run_train.sh"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_train.sh").write_text("")  # another program
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert train_command() == f"{REPOSITORY}/run_train.sh"  # a clone that is not installed
    (tmp_path / "titanlike").write_text("")
    assert train_command() == "titanlike train"
