"""`titanlike verify`: a layout against one process, or compiled code against eager code."""

import argparse
import re
from typing import NoReturn

from titanlike.config import UserError
from titanlike.config.shipped import recipe_path
from titanlike.run.start import Arguments
from titanlike.tools.arguments import positive_int
from titanlike.tools.cli.command import OVERRIDE_TEXT, RECIPE_KEYS, add_command
from titanlike.tools.verify.recipe import verify

DESCRIPTION = """\
Compares a layout with one process, or compiled code with eager code, numerically, on the CPUs of this machine. Exits with code 0 if
they agree up to rounding, otherwise with code 1.

A recipe: trains a reduced model with the recipe's program twice, and prints losses, gradient norms and the largest difference of
any weight.

  titanlike verify llama3_8b --layout tensor=2,pipeline=2
  titanlike verify experiments/changed.toml --layout pipeline=2,pipeline_schedule=zbv --activation_checkpoint.mode=full

A module of your own: FILE.py defines

  model() -> torch.nn.Module        with its initial weights; the part after the colon names the function
  batch(step)                       the global batch: a tensor, or a tuple or dict of tensors
  parallelize(model, mesh)          applies the plan; not required for a transformers model with a tp_plan

and, where the defaults do not fit, shard_batch(batch, mesh), loss(model, batch), backward(model, batch), clip(model),
optimizer(model) and after_step(model, optimizer, step). --layout names dimensions of the mesh. Compares initial weights, outputs,
loss, gradients, their norm, weights, optimizer state, buffers and dropout masks, and says what is wrong first, by what factor, and
what usually causes that. See docs/verify.md.

  titanlike verify build.py:model --layout tensor=2
  titanlike verify build.py:model --layout shard=2,tensor=2

With --compile: outputs, losses and gradients of compiled blocks against those of eager code, in one process, over micro-batches of
several shapes, with accumulation, recomputation and dropout. A file may define compile(model), which replaces that of blocks.

  titanlike verify llama3_8b --compile
  titanlike verify build.py:model --compile --compile.backend=aot_eager"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    command = add_command(
        commands,
        "verify",
        DESCRIPTION,
        run,
        overrides=RECIPE_KEYS,
    )
    command.add_argument(
        "recipe",
        metavar="RECIPE|FILE.py:FUNCTION",
        help=f"recipe, where {OVERRIDE_TEXT}, or function of a file that returns a module",
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile", action="store_true", help="compare compiled code with eager code")
    what.add_argument(
        "--layout",
        help="of a recipe: keys of [parallelism]; of a module: dimensions of the mesh, outermost first. Those not named are 1",
    )
    command.add_argument(
        "--steps", type=positive_int, metavar="N", help="optimizer steps (default: 5, of a module or compiled code 3)"
    )
    command.add_argument(
        "--tolerance",
        default="",
        metavar="NUMBER",
        help="maximum relative difference, of all quantities, or of some: loss=1e-4,gradient_norm=1e-3,weights=1e-3",
    )


def run(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    is_recipe = not re.fullmatch(r".+\.py(:\w*)?", arguments.recipe)
    if arguments.compile:
        _verify_compiled(arguments, is_recipe)
    if is_recipe:
        verify(
            recipe_path(arguments.recipe),
            arguments.layout,
            arguments.steps or 5,
            arguments.tolerance,
            arguments.overrides,
        )
    if arguments.overrides:
        raise UserError(f"{arguments.recipe} is no recipe, so it takes no {' '.join(arguments.overrides)}")
    from titanlike.tools.verify.module import verify_file  # imports torch

    verify_file(arguments.recipe, arguments.layout, arguments.steps or 3, arguments.tolerance)


def _verify_compiled(arguments: argparse.Namespace, is_recipe: bool) -> NoReturn:
    from titanlike.tools.verify import compiled, compiled_recipe  # imports torch

    steps, keys = arguments.steps or 3, Arguments(arguments.overrides).overrides
    if is_recipe:
        compiled_recipe.verify_compiled_recipe(recipe_path(arguments.recipe), steps, arguments.tolerance, keys)
    backend = keys.pop("compile.backend", "")
    if keys:
        raise UserError(
            f"{arguments.recipe} is no recipe, so it takes --compile.backend, and no {', '.join(f'--{key}' for key in keys)}"
        )
    compiled.verify_compiled_file(arguments.recipe, backend, steps, arguments.tolerance)
