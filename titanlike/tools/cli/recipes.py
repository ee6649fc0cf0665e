"""`titanlike recipes`: the shipped recipes, and a copy of one with its program."""

import argparse
import json
import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import tomli

from titanlike.config import UserError
from titanlike.config.base import nearest, shown
from titanlike.config.shipped import shipped_recipes, train_command
from titanlike.recipe.load import joined
from titanlike.run.start import program_of
from titanlike.tools.cli.command import add_command
from titanlike.tools.output_files import refuse_existing, writing

DESCRIPTION = """\
Lists the shipped recipes, or copies one with its program. The copied recipe runs the copied program, which has its name. Replaces
no file.

  titanlike recipes
  titanlike recipes copy debug my/                 my/debug.toml and my/debug.py
  titanlike recipes copy debug my/noisy.toml       my/noisy.toml and my/noisy.py"""


def add(commands: Any) -> None:
    """Adds `recipes` to the commands of `titanlike`."""
    parser = add_command(commands, "recipes", DESCRIPTION, run)
    actions = parser.add_subparsers(metavar="copy")
    copy = add_command(actions, "copy", "Writes a copy of a recipe and of its program.", _copy)
    copy.add_argument("name", metavar="NAME", help="shipped recipe, such as debug")
    copy.add_argument("target", type=Path, metavar="FOLDER|RECIPE.toml", help="folder, or file of the copied recipe")


def run(arguments: argparse.Namespace) -> None:
    """Lists the recipes."""
    found = shipped_recipes()
    width = max(map(len, found))
    for name, path in found.items():
        print(f"{name:<{width}}  {program_of(path).stem:<8}  {_first_sentence(path.read_text())}")


def _comment(text: str) -> list[str]:
    """Returns the lines of the comment at the top of a recipe, without the schema, which is beside the shipped ones only."""
    lines = (line for line in text.splitlines() if not line.startswith("#:"))
    return list(takewhile(lambda line: line.startswith("#"), lines))


def _first_sentence(text: str) -> str:
    comment = " ".join(line.removeprefix("# ") for line in _comment(text))
    return re.split(r"(?<=\.) (?=[A-Z])", comment)[0]


def _copy(arguments: argparse.Namespace) -> None:
    found, name, target = shipped_recipes(), arguments.name, arguments.target
    if name not in found:
        near = nearest(name, list(found))
        hint = f"did you mean {near}?" if near else "`titanlike recipes` lists them"
        raise UserError(f"{shown(name)} is not a shipped recipe; {hint}")
    if target.suffix[1:].isalpha() and target.suffix != ".toml" and not target.is_dir():
        raise UserError(f"{target}: give a folder, or the file of a recipe, which ends in .toml")
    recipe = target if target.suffix == ".toml" else target / f"{Path(name).name}.toml"
    program = recipe.with_suffix(".py")
    for path in (recipe, program):
        refuse_existing(path)
    text = found[name].read_text()
    if "extends" in tomli.loads(text):
        text = "\n".join([*_comment(text), joined(found[name], program=recipe.stem)])
    else:
        text = re.sub("^program = .*", f"program = {json.dumps(recipe.stem)}", text, flags=re.MULTILINE)
        text = re.sub("^#:.*\n", "", text)
    with writing(target):
        recipe.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(program_of(found[name]).read_text())
        recipe.write_text(text)
    print(f"wrote {program} and {recipe}, which names it")
    print(f"next  {train_command()} {shlex.quote(str(recipe))}")
