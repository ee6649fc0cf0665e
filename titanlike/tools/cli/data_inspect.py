"""`titanlike data inspect`: prints the sequences that a rank reads, or the contents of token shards."""

import argparse
from typing import Any

from titanlike.config import UserError
from titanlike.config.shipped import recipe_path
from titanlike.run.start import Arguments, program_of
from titanlike.tools.arguments import non_negative_int, positive_int
from titanlike.tools.cli.command import OVERRIDE_TEXT, RECIPE_KEYS, add_command
from titanlike.tools.programs import SHIPPED, load_known

DESCRIPTION = """\
Prints the text that a rank reads in a step, or the contents of token shards. Of text, documents have alternating colors, separators
are highlighted, and prompts are dim. Of token shards: splits, shards, lengths of documents, and what was removed, with examples.

  titanlike data inspect debug --step 3 --rank 1 --ranks 4
  titanlike data inspect gpt2_124m --data.path=data/corpus --validation
  titanlike data inspect data/corpus --verify
  titanlike data inspect data/corpus --json"""


def add(commands: Any) -> None:
    """Adds `inspect` to the subcommands of `titanlike data`."""
    parser = add_command(
        commands,
        "inspect",
        DESCRIPTION,
        run,
        overrides=RECIPE_KEYS,
    )
    text = f"recipe, where {OVERRIDE_TEXT}, or folder of token shards"
    parser.add_argument("path", metavar="RECIPE|FOLDER", help=text)
    parser.add_argument("--step", type=positive_int, default=1, metavar="N", help="training step, from 1")
    parser.add_argument("--rank", type=non_negative_int, default=0, metavar="N", help="data-parallel rank, from 0")
    parser.add_argument("--ranks", type=positive_int, default=1, metavar="N", help="number of data-parallel ranks")
    parser.add_argument(
        "--sequences", type=positive_int, default=2, metavar="N", help="most sequences, shards or examples"
    )
    parser.add_argument("--validation", action="store_true", help="print validation sequences, not training sequences")
    parser.add_argument("--json", action="store_true", help="token shards: print the manifest and the report as JSON")
    parser.add_argument("--verify", action="store_true", help="token shards: check the hash of every file")


def run(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    from titanlike.tools.data.inspection import inspect_recipe, inspect_shards, shards_as_json, verify_shards
    from titanlike.tools.rich_console import RichConsole

    console = RichConsole(highlight=False, soft_wrap=True)
    if recipe_path(arguments.path).suffix != ".toml":
        if arguments.overrides:
            raise UserError(f"{' '.join(arguments.overrides)}: token shards have no recipe keys to override")
        if arguments.validation:
            raise UserError(f"--validation requires a recipe; {arguments.path} is read as a folder of token shards")
        if arguments.verify:
            verify_shards(arguments.path)
        if arguments.json:
            print(shards_as_json(arguments.path))
            return
        inspect_shards(arguments.path, limit=arguments.sequences, console=console)
        if arguments.verify:
            console.print("        all files match the manifest", style="green")
        return
    for name in ("json", "verify"):
        if getattr(arguments, name):
            raise UserError(f"--{name} requires a folder of token shards; {arguments.path} is a recipe")
    command_line = Arguments([arguments.path, *arguments.overrides])
    program = program_of(command_line.recipe, command_line.overrides.get("program"))
    if program not in SHIPPED and "open_sources" in program.read_text().replace("open_sources=openers.of(", ""):
        console.print(
            f"note    {program.name} may open other data: this is what the keys of the recipe name", markup=False
        )
    inspect_recipe(
        load_known(command_line.recipe, command_line.overrides),
        step=arguments.step,
        rank=arguments.rank,
        ranks=arguments.ranks,
        limit=arguments.sequences,
        validation=arguments.validation,
        console=console,
    )
