"""`titanlike COMMAND`: the commands that are not training itself."""

import argparse
import json
from pathlib import Path

from titanlike import environment
from titanlike.config import PretrainRecipe
from titanlike.config.schema import editor_schema
from titanlike.verify import verify

VERIFY = """\
Runs the recipe's own program twice, its model made small: in one process, and under the layout. Prints losses, gradient norms
and the largest difference of any weight side by side. Ends with 0 if they are the same but for rounding, with 1 if not.

  titanlike verify train_configs/llama3_8b.toml --layout tensor=2,pipeline=2
  titanlike verify mine/changed.toml --layout pipeline=2,pipeline_schedule=zbv --activation_checkpoint.mode=full"""


def main() -> None:
    """Run the command of this command line."""
    environment.end_quietly_on_interrupt()
    parser = argparse.ArgumentParser(prog="titanlike", description="Training itself is started by ./run_train.sh.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("schema", help="print the JSON Schema of recipes, for editors")
    check = commands.add_parser(
        "verify",
        help="hold a layout against one process, numerically, here",
        description=VERIFY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("recipe", type=Path, help="the recipe; --section.key=value changes it as with ./run_train.sh")
    check.add_argument("--layout", required=True, help="keys of [parallelism]; a dimension that is not named is 1")
    check.add_argument("--steps", type=_count, default=5, help="optimizer steps (5)")
    arguments, overrides = parser.parse_known_args()
    if arguments.command == "schema":
        if overrides:
            parser.error(f"schema takes no {' '.join(overrides)}")
        print(json.dumps(editor_schema(PretrainRecipe), indent=2))
    else:
        verify(arguments.recipe, arguments.layout, arguments.steps, overrides)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps")
    return int(text)


if __name__ == "__main__":
    main()
