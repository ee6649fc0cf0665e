"""Tells which program a user's file is of, and converts it. `titanlike import` and `titanlike plan` call it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import refuse_credentials, shown
from titanlike.config.shipped import train_command
from titanlike.interop.hf_folder import read_json
from titanlike.recipe.load import is_torchtitan, parse
from titanlike.tools.migration import hugging_face, megatron, torchtitan, torchtitan_config
from titanlike.tools.migration.conversion import Conversion
from titanlike.tools.output_files import refuse_existing, write_text

SCRIPTS = (".sh", ".sbatch", ".slurm", ".bash", ".txt", "")


def convert(
    path: Path, num_gpus: int | None = None, env: Mapping[str, str] | None = None, *, trust: bool = False
) -> Conversion | None:
    """Returns a file of another program as a recipe; None for a recipe of this toolkit.

    Args:
        num_gpus: of the job, for programs whose batch or layout depends on it.
        env, trust: how a script is run (`run_script`).
    """
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None  # reported where recipes are read
    if path.suffix == ".json":
        values = read_json(path)
        if "model_spec" not in values:
            return hugging_face.convert(path)
        return _of_torchtitan(str(path), values, num_gpus)
    if path.suffix in SCRIPTS:
        job = megatron.convert(str(path), text, num_gpus, path.parent, env, trust=trust)
        refuse_credentials("", dict(job.given) if job else {})
        return job
    try:
        values = parse(text)
    except ValueError:
        return None
    if not is_torchtitan(values):
        return None
    refuse_credentials("", values)
    return torchtitan.convert(str(path), values, num_gpus)


def import_recipe(source: Path, recipe: Path, num_gpus: int | None, env: Mapping[str, str], *, trust: bool) -> None:
    """Writes the recipe of another program's file or of a model's folder, and prints what was mapped."""
    job = convert(source, num_gpus, env, trust=trust) if source.is_file() else hugging_face.finetune(source)
    name = shown(str(source))
    if job is None:
        raise UserError(
            f"{name} is no file that can be imported: give a job config of torchtitan (.toml or .json), a shell script that starts "
            "Megatron-LM (.sh), or the folder of a Hugging Face model"
        )
    if not job.is_job:
        raise UserError(
            f"{name} has no training in it: `titanlike plan {name} --gpus N` prices it, and `titanlike import` takes its "
            "folder, with the weights"
        )
    write_recipe(job, recipe, num_gpus)


def import_command_line(words: Sequence[str], python: str, recipe: Path, num_gpus: int | None) -> None:
    """Writes the recipe of a config of torchtitan 0.3, which the command line of its program names."""
    values = torchtitan_config.read_config(python, words)
    write_recipe(_of_torchtitan(" ".join(words), values, num_gpus), recipe, num_gpus)


def _of_torchtitan(name: str, values: Mapping[str, Any], num_gpus: int | None) -> Conversion:
    refuse_credentials("", values)
    try:
        return torchtitan_config.convert(name, values, num_gpus)
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, RecursionError, re.error) as error:
        raise UserError(
            f"{name} is no config as torchtitan_dump.py prints it: {type(error).__name__}: {error}"
        ) from None


def write_recipe(job: Conversion, recipe: Path, num_gpus: int | None) -> None:
    """Writes a recipe, and prints what was mapped."""
    refuse_existing(recipe)
    write_text(recipe, job.text())
    check = f"check it with {train_command()} {recipe} --check {num_gpus or job.num_gpus or 'N'}"
    print("\n".join([f"{recipe}: written from {shown(job.source)}", *job.summary(), check]))
