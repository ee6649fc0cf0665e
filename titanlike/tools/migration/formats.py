"""Tells which program a user's file is of, and converts it. `titanlike import` and `titanlike plan` call it."""

from collections.abc import Mapping
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.base import refuse_credentials, shown
from titanlike.config.shipped import train_command
from titanlike.recipe.load import is_torchtitan, parse
from titanlike.tools.migration import hugging_face, megatron, torchtitan
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
        return hugging_face.convert(path)
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
            f"{name} is no file that can be imported: give a job config of torchtitan (.toml), a shell script that starts "
            "Megatron-LM (.sh), or the folder of a Hugging Face model"
        )
    if not job.is_job:
        raise UserError(
            f"{name} has no training in it: `titanlike plan {name} --gpus N` prices it, and `titanlike import` takes its "
            "folder, with the weights"
        )
    refuse_existing(recipe)
    write_text(recipe, job.text())
    check = f"check it with {train_command()} {recipe} --check {num_gpus or job.num_gpus or 'N'}"
    print("\n".join([f"{recipe}: written from {source}", *job.summary(), check]))
