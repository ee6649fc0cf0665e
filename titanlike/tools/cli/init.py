"""`titanlike init`: a commented recipe for this machine and data."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.shipped import train_command
from titanlike.distributed import environment
from titanlike.tools.arguments import non_negative_int
from titanlike.tools.cli.command import add_command
from titanlike.tools.output_files import refuse_existing, write_text
from titanlike.tools.planning.hardware import DEFAULT_HARDWARE
from titanlike.utils import system

DESCRIPTION = """\
Writes a recipe for this machine and data, with a comment on each key. The planner chooses the layout. The model is the largest that
the GPUs train on enough tokens within a week, if there is enough data. Asks nothing, and replaces no file.

  titanlike init                                   for this machine
  titanlike init train.toml --data corpus/         on text, or on token shards
  titanlike init train.toml --gpus 8 --hardware h200 --model 3-8B"""


def add(commands: Any) -> None:
    """Adds `init` to the commands of `titanlike`."""
    parser = add_command(commands, "init", DESCRIPTION, run)
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("train.toml"), metavar="RECIPE.toml", help="recipe to write"
    )
    text = "text, or a folder of token shards (default: Python's standard library on a CPU, data/train on GPUs)"
    parser.add_argument("--data", default="", metavar="PATH", help=text)
    text = "number of GPUs; 0 trains on the CPU (default: all of this machine)"
    parser.add_argument("--gpus", type=non_negative_int, metavar="N", help=text)
    text = f"hardware to plan for (default: the GPUs of this machine if they are known, otherwise {DEFAULT_HARDWARE})"
    parser.add_argument("--hardware", default="", metavar="NAME|FILE", help=text)
    parser.add_argument("--model", default="", metavar="SIZE", help="size of the model, such as 124M or 3-8B")


def run(arguments: argparse.Namespace) -> None:
    """Writes the recipe and prints the next commands."""
    from titanlike.tools import new_recipe
    from titanlike.tools.planning.hardware import load_hardware

    path = arguments.path
    if path.suffix != ".toml":
        raise UserError(f"{path}: give the name of a .toml file")
    refuse_existing(path)
    num_gpus = system.num_gpus() if arguments.gpus is None else arguments.gpus
    if num_gpus > environment.MAX_PROCESSES:
        raise UserError(f"--gpus {num_gpus}: give at most {environment.MAX_PROCESSES:,}")
    source = new_recipe.find_source(arguments.data)
    named = arguments.hardware or DEFAULT_HARDWARE
    hardware = (None if arguments.hardware else new_recipe.hardware_here()) or load_hardware(named)
    values = new_recipe.new_recipe(source, num_gpus, hardware, arguments.model)
    where = f"{num_gpus} x {hardware.name}" if num_gpus else "one process on a CPU"
    heading = f"Written by `titanlike init` for {where}. `{train_command()} --help all` describes all keys."
    if "groups" in values["optimizer"]:
        heading += (
            f"\nOptimizer, schedule and batch are those of {new_recipe.MEASURED.name}: the best that were compared."
        )
    write_text(path, new_recipe.commented(values, heading))
    training = values["training"]
    tokens = training["steps"] * training["global_batch_size"] * training["seq_len"]
    print(f"wrote {path} for {where}: {values['model']['name']} {values['model']['size']}, {tokens:,} tokens")
    if values["data"]["source"] == "shards" and not source.tokenizer:
        text = shlex.quote(source.path or "TEXT")
        encoding = values["tokenizer"]["encoding"]
        print(
            f"next  titanlike data prepare {text} --out {shlex.quote(values['data']['path'])} --tokenizer {shlex.quote(encoding)}"
        )
    else:
        print(f"next  {train_command()} {shlex.quote(str(path))} --check {max(num_gpus, 1)}")
    print(f"      {train_command()} {shlex.quote(str(path))}")
    sys.stdout.flush()
