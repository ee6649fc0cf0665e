"""`titanlike COMMAND`."""

import argparse
import json
import signal
import sys
from typing import NoReturn

import titanlike
from titanlike.config import UserError
from titanlike.config.base import nearest, shown
from titanlike.distributed import environment
from titanlike.distributed.command_line import command_line
from titanlike.run import launch as trainer
from titanlike.run.start import Arguments
from titanlike.tools.cli import (
    compare,
    data,
    doctor,
    evaluate,
    generate,
    init,
    interchange,
    launch,
    lm_eval,
    plan,
    profile,
    recipes,
    sweep,
    verify,
)
from titanlike.tools.cli.command import add_command, refuse_unknown
from titanlike.tools.cli.train import train_stages
from titanlike.tools.programs import recipe_types
from titanlike.tools.schema import editor_schema, markdown
from titanlike.utils import system

# Modules of commands, in the order of --help.
MODULES = (
    init,
    recipes,
    plan,
    verify,
    doctor,
    launch,
    profile,
    compare,
    sweep,
    data,
    interchange,
    generate,
    evaluate,
    lm_eval,
)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="titanlike", description="Trains, and has the tools for recipes, data, runs and checkpoints."
    )
    parser.add_argument("--version", action="version", version=f"titanlike {titanlike.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "train", add_help=False, help="Trains a recipe, or several one after the other; see titanlike train --help"
    )
    for module in MODULES:
        module.add(commands)
    schema = add_command(commands, "schema", "Prints the JSON Schema of recipes, for editors.", _print_schema)
    schema.add_argument("--markdown", action="store_true", help="print the configuration reference instead")
    parser.set_defaults(names=list(commands.choices))
    return parser


@command_line()
def main() -> None:
    """Runs the command named on the command line."""
    system.exit_on_interrupt()
    if sys.argv[1:2] == ["train"]:  # its arguments belong to the recipe's program
        _train(sys.argv[2:])
    parser = build_parser()
    if not sys.argv[1:]:
        parser.print_help()
        sys.exit(2)
    names = parser.get_default("names")
    if (name := sys.argv[1]) not in names and (near := nearest(name, names, cutoff=0.75)):
        environment.fail(UserError(f"{shown(name)} is not a command; did you mean titanlike {near}?"))
    arguments, overrides = parser.parse_known_args(interchange.with_source(sys.argv[1:]))
    arguments.overrides = overrides
    try:
        refuse_unknown(arguments, overrides)
        if (code := arguments.run(arguments)) is not None:
            sys.exit(code)
    except UserError as error:
        environment.fail(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _train(argv: list[str]) -> NoReturn:
    """Trains a recipe, or several one after the other."""
    try:
        if len(Arguments(argv, many=True).recipes) > 1:
            sys.exit(train_stages(argv))
    except UserError as error:
        environment.fail(error)
    trainer.main(argv)


def _print_schema(arguments: argparse.Namespace) -> None:
    if arguments.markdown:
        print(markdown(recipe_types()), end="")
    else:
        print(json.dumps(editor_schema(recipe_types()), indent=2))


if __name__ == "__main__":
    main()
