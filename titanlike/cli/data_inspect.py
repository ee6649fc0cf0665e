"""`titanlike data inspect`: what a rank will read, or what a folder of shards has. No torch."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlike.config import PretrainRecipe, UserError, load
from titanlike.distributed import environment

INSPECT = """\
Shows the text that a data rank reads in a step: documents in turning colours, their ends marked, what is given and not learnt
dim. Of a folder of token shards: what is in it.

  titanlike data inspect train_configs/debug.toml --step 3 --rank 1 --ranks 4
  titanlike data inspect train_configs/gpt2_124m.toml --data.path=data/corpus --validation
  titanlike data inspect data/corpus --verify"""


def add(commands: Any) -> None:
    """Add `inspect` to the commands of `titanlike data`."""
    look = commands.add_parser(
        "inspect",
        help="show what a rank will read, or what a folder of shards has",
        description=INSPECT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    look.add_argument("what", metavar="RECIPE.toml|FOLDER", help="a recipe (--section.key=value changes it), or shards")
    look.add_argument("--step", type=int, default=1, metavar="N", help="the step whose batch is shown (1)")
    look.add_argument("--rank", type=int, default=0, metavar="N", help="the data rank, from 0 (0)")
    look.add_argument("--ranks", type=int, default=1, metavar="N", help="how many data ranks share a batch (1)")
    look.add_argument("--sequences", type=int, default=2, metavar="N", help="sequences, or shards, shown at most (2)")
    look.add_argument("--validation", action="store_true", help="what is held out, in place of what is learnt")
    look.add_argument("--verify", action="store_true", help="of shards: read every file and compare its hash")


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Show it, or say what is wrong."""
    from rich.console import Console

    from titanlike.data.inspection import inspect_recipe, inspect_shards

    console = Console(highlight=False, soft_wrap=True)
    try:
        for name, least in (("step", 1), ("rank", 0), ("ranks", 1), ("sequences", 1)):
            if getattr(arguments, name) < least:
                raise UserError(f"--{name} {getattr(arguments, name)}: give a whole number from {least} on")
        if not arguments.what.endswith(".toml"):
            if overrides:
                raise UserError(f"{' '.join(overrides)}: shards take no keys of a recipe")
            inspect_shards(arguments.what, verify=arguments.verify, most=arguments.sequences, console=console)
            return
        keys = {}
        for word in overrides:
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or not equals:
                raise UserError(f"{word}: a key of the recipe is changed with --section.key=value")
            keys[name] = value
        inspect_recipe(
            load(PretrainRecipe, Path(arguments.what), keys),
            step=arguments.step,
            rank=arguments.rank,
            ranks=arguments.ranks,
            most=arguments.sequences,
            validation=arguments.validation,
            console=console,
        )
    except UserError as error:
        environment.fail(error)
