"""`titanlike COMMAND`: the commands that are not training itself."""

import argparse
import json
from pathlib import Path

from titanlike.cli import data
from titanlike.config import PretrainRecipe, UserError
from titanlike.config.schema import editor_schema, markdown
from titanlike.distributed import environment
from titanlike.utils import system
from titanlike.verify import verify

VERIFY = """\
Runs the recipe's own program twice, its model made small: in one process, and under the layout. Prints losses, gradient norms
and the largest difference of any weight side by side. Ends with 0 if they are the same but for rounding, with 1 if not.

  titanlike verify train_configs/llama3_8b.toml --layout tensor=2,pipeline=2
  titanlike verify mine/changed.toml --layout pipeline=2,pipeline_schedule=zbv --activation_checkpoint.mode=full"""


def build_parser() -> argparse.ArgumentParser:
    """All commands and what they take."""
    parser = argparse.ArgumentParser(prog="titanlike", description="Training itself is started by ./run_train.sh.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    schema = commands.add_parser("schema", help="print the JSON Schema of recipes, for editors")
    schema.add_argument("--markdown", action="store_true", help="print the configuration reference instead")
    check = commands.add_parser(
        "verify",
        help="hold a layout against one process, numerically, here",
        description=VERIFY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("recipe", type=Path, help="the recipe; --section.key=value changes it as with ./run_train.sh")
    check.add_argument("--layout", required=True, help="keys of [parallelism]; a dimension that is not named is 1")
    check.add_argument("--steps", type=_count, default=5, help="optimizer steps (5)")
    whole = commands.add_parser(
        "consolidate",
        help="make one file of a checkpoint's weights",
        description="Writes the weights of a checkpoint, whole and without the optimizer, into one safetensors file.",
    )
    whole.add_argument("checkpoint", type=Path, help="a folder such as runs/NAME/checkpoints/step-00001000")
    whole.add_argument("file", type=Path, help="the file to write, such as weights.safetensors")
    whole.add_argument("--dtype", choices=["float32", "bfloat16"], help="convert to this precision")
    data.add(commands)
    return parser


def main() -> None:
    """Run the command of this command line."""
    system.exit_on_interrupt()
    parser = build_parser()
    arguments, overrides = parser.parse_known_args()
    takes_keys = arguments.command == "verify" or getattr(arguments, "data_command", "") == "inspect"
    if overrides and not takes_keys:
        parser.error(f"{arguments.command} takes no {' '.join(overrides)}")
    if arguments.command == "schema":
        if arguments.markdown:
            print(markdown(PretrainRecipe), end="")
        else:
            print(json.dumps(editor_schema(PretrainRecipe), indent=2))
    elif arguments.command == "data":
        data.run(arguments, overrides)
    elif arguments.command == "consolidate":
        _consolidate(arguments.checkpoint, arguments.file, arguments.dtype)
    else:
        verify(arguments.recipe, arguments.layout, arguments.steps, overrides)


def _consolidate(checkpoint: Path, file: Path, dtype: str | None) -> None:
    import torch  # only here: `--help` and `schema` need not wait for it

    from titanlike.checkpoint import consolidate

    try:
        written = consolidate(checkpoint, file, getattr(torch, dtype) if dtype else None)
    except OSError as error:
        environment.fail(UserError(f"{file} cannot be written: {error.strerror}"))
    except UserError as error:
        environment.fail(error)
    print(f"{file}: {written.size:,} bytes, sha256 {written.sha256}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps")
    return int(text)


if __name__ == "__main__":
    main()
