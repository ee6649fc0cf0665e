"""Writes the result of a search as a recipe that extends the original one. Does not import torch."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.load import dump
from titanlike.tools.planning.changes import changes_rounding, value_of
from titanlike.tools.planning.search import Candidate
from titanlike.utils.atomic_io import atomic_write_text

FIRST_LINE = "# Written by `titanlike plan --search`"


def write(path: Path, original: Path, recipe: PretrainRecipe, overrides: Iterable[str], best: Candidate) -> None:
    """Writes a recipe with the keys of a candidate, and those of the command line, that extends the original recipe.

    Args:
        path: The file to write. A file that was not written by a search is not replaced.
        original: The file of the original recipe.
        recipe: The original recipe, with the overrides of the command line applied.
        overrides: Names of the overridden keys.
        best: The candidate.
    """
    refuse_to_replace(path)
    planned = best.plan.job.recipe
    names = [name for name in overrides if "." in name] + [name for name in best.changes if name not in overrides]
    values: dict[str, Any] = {"extends": os.path.relpath(original, path.parent)}
    if planned.recipe != recipe.recipe:
        values["recipe"] = planned.recipe
    for name in names:
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value_of(planned, name)
    rounding = "\n# float8 changes the rounding of the result." if changes_rounding(best.changes) else ""
    comment = (
        f"{FIRST_LINE} for {best.plan.job.num_gpus} x {best.plan.hardware.name}: "
        f"{best.plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU planned.{rounding}\n"
    )
    try:
        atomic_write_text(path, comment + dump(values))
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}; choose another file") from None


def refuse_to_replace(path: Path) -> None:
    """Raises `UserError` if a file would be lost, or is not a recipe."""
    if path.suffix != ".toml":
        raise UserError(f"--write {path}: give the name of a .toml file")
    if path.exists() and not (path.is_file() and path.read_text(errors="replace").startswith(FIRST_LINE)):
        raise UserError(f"--write {path}: exists and was not written by --search; choose another name")
