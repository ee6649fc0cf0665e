"""`titanlike COMMAND`: all commands except training."""

import argparse
import json
import sys
from pathlib import Path

from titanlike.cli import data, evaluate, generate, harness, plan, sweep, weights
from titanlike.config import PretrainRecipe, UserError
from titanlike.config.base import shown
from titanlike.config.schema import editor_schema, markdown
from titanlike.distributed import environment
from titanlike.utils import system
from titanlike.utils.arguments import positive_int, refuse_undecodable
from titanlike.verify import verify

VERIFY = """\
Trains a reduced model with the recipe's program twice, in one process and under the layout. Prints losses, gradient norms and the
largest difference of any weight. Exits with code 0 if they agree up to rounding, otherwise with code 1.

  titanlike verify train_configs/llama3_8b.toml --layout tensor=2,pipeline=2
  titanlike verify experiments/changed.toml --layout pipeline=2,pipeline_schedule=zbv --activation_checkpoint.mode=full"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="titanlike", description="Tools for recipes, data and checkpoints. ./run_train.sh trains."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    schema = commands.add_parser("schema", help="print the JSON Schema of recipes, for editors")
    schema.add_argument("--markdown", action="store_true", help="print the configuration reference instead")
    command = commands.add_parser(
        "verify",
        help="compare a layout with a single process numerically, on this machine",
        description=VERIFY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("recipe", type=Path, help="recipe; override its keys with --section.key=value")
    command.add_argument("--layout", required=True, help="keys of [parallelism]; dimensions that are not named are 1")
    command.add_argument("--steps", type=positive_int, default=5, help="optimizer steps (default: 5)")
    command.add_argument(
        "--tolerance",
        default="",
        metavar="NUMBER",
        help="maximum relative difference, for all quantities, or for some: loss=1e-4,gradient_norm=1e-3,weights=1e-3",
    )
    plan.add(commands)
    sweep.add(commands)
    weights.add(commands)
    data.add(commands)
    generate.add(commands)
    evaluate.add(commands)
    harness.add(commands)
    return parser


def main() -> None:
    """Runs the command named on the command line."""
    system.exit_on_interrupt()
    parser = build_parser()
    try:
        refuse_undecodable(sys.argv)
    except UserError as error:
        environment.fail(error)
    arguments, overrides = parser.parse_known_args()
    accepts_overrides = (
        arguments.command in ("plan", "sweep", "verify") or getattr(arguments, "data_command", "") == "inspect"
    )
    if overrides and not accepts_overrides:
        parser.error(f"{arguments.command} takes no {shown(' '.join(overrides))}")
    if arguments.command == "schema":
        if arguments.markdown:
            print(markdown(PretrainRecipe), end="")
        else:
            print(json.dumps(editor_schema(PretrainRecipe), indent=2))
    elif arguments.command == "data":
        data.run(arguments, overrides)
    elif arguments.command == "plan":
        plan.run(arguments, overrides)
    elif arguments.command == "sweep":
        sweep.run(arguments, overrides)
    elif arguments.command in ("export", "import"):
        weights.run(arguments)
    elif arguments.command == "generate":
        generate.run(arguments)
    elif arguments.command == "evaluate":
        evaluate.run(arguments)
    elif arguments.command == "lm_eval":
        harness.run(arguments.arguments)
    else:
        verify(arguments.recipe, arguments.layout, arguments.steps, arguments.tolerance, overrides)


if __name__ == "__main__":
    main()
