"""`titanlike COMMAND`."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import titanlike
from titanlike.config import UserError
from titanlike.config.base import nearest, shown
from titanlike.distributed import environment
from titanlike.distributed.command_line import command_line
from titanlike.run import launch as trainer
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
from titanlike.tools.programs import recipe_types
from titanlike.tools.schema import editor_schema, markdown
from titanlike.utils import system

# Modules of commands, in the order of --help.
MODULES = (
    verify,
    recipes,
    init,
    doctor,
    plan,
    launch,
    profile,
    compare,
    sweep,
    interchange,
    data,
    generate,
    evaluate,
    lm_eval,
)

Command = Callable[[argparse.Namespace], None]
CommandWithOverrides = Callable[[argparse.Namespace, Sequence[str]], None]

COMMANDS: dict[str, Command] = {
    "schema": lambda arguments: _print_schema(as_markdown=arguments.markdown),
    "recipes": recipes.run,
    "init": init.run,
    "doctor": lambda arguments: sys.exit(doctor.run(arguments)),
    "compare": compare.run,
    "export": interchange.run,
    "import": interchange.run,
    "generate": generate.run,
    "evaluate": evaluate.run,
    "lm_eval": lambda arguments: lm_eval.run(arguments.arguments),
}
# Those that accept --section.key=value.
WITH_OVERRIDES: dict[str, CommandWithOverrides] = {
    "plan": plan.run,
    "launch": launch.run,
    "profile": profile.run,
    "sweep": sweep.run,
    "data": data.run,
    "verify": verify.run,
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="titanlike", description="Trains, and has the tools for recipes, data, runs and checkpoints."
    )
    parser.add_argument("--version", action="version", version=f"titanlike {titanlike.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", add_help=False, help="train a recipe; see titanlike train --help")
    schema = commands.add_parser("schema", help="print the JSON Schema of recipes, for editors")
    schema.add_argument("--markdown", action="store_true", help="print the configuration reference instead")
    for module in MODULES:
        module.add(commands)
    return parser


@command_line()
def main() -> None:
    """Runs the command named on the command line."""
    system.exit_on_interrupt()
    if sys.argv[1:2] == ["train"]:  # its arguments belong to the recipe's program
        trainer.main(sys.argv[2:])
    parser = build_parser()
    if not sys.argv[1:]:
        parser.print_help()
        sys.exit(2)
    commands = [*COMMANDS, *WITH_OVERRIDES, "train"]
    if (name := sys.argv[1]) not in commands and (near := nearest(name, commands, cutoff=0.75)):
        environment.fail(UserError(f"{shown(name)} is not a command; did you mean titanlike {near}?"))
    arguments, overrides = parser.parse_known_args()
    command, is_inspection = arguments.command, getattr(arguments, "data_command", "") == "inspect"
    if overrides and (command not in WITH_OVERRIDES or (command == "data" and not is_inspection)):
        parser.error(f"{command} takes no {shown(' '.join(overrides))}")
    if command in WITH_OVERRIDES:
        WITH_OVERRIDES[command](arguments, overrides)
    else:
        COMMANDS[command](arguments)


def _print_schema(*, as_markdown: bool) -> None:
    if as_markdown:
        print(markdown(recipe_types()), end="")
    else:
        print(json.dumps(editor_schema(recipe_types()), indent=2))


if __name__ == "__main__":
    main()
