"""Recipes that are trained one after the other, each from the last weights of the one before. Does not import torch."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlike.config import UserError
from titanlike.interop.hf_folder import different_fields
from titanlike.recipe import PretrainRecipe
from titanlike.run.start import name_of
from titanlike.tools.programs import load_known


@dataclass(frozen=True)
class Stage:
    """A recipe, and the run that trains it."""

    path: Path
    recipe: PretrainRecipe
    run_name: str

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.recipe.run.dir, self.run_name)

    @property
    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint of the run, if there is one."""
        parent = self.recipe.checkpoint.dir
        checkpoints = Path(parent, self.run_name) if parent else self.folder / "checkpoints"
        file = checkpoints / "latest"
        return checkpoints / file.read_text().strip() if file.exists() else None

    @property
    def is_trained(self) -> bool:
        """Whether the run has saved its last step."""
        newest = self.newest_checkpoint
        return newest is not None and int(newest.name.removeprefix("step-")) == self.recipe.training.steps


def load_stages(
    paths: Sequence[Path],
    overrides: Mapping[str, str],
    name: str = "",
    on_ignored: Callable[[str], None] = lambda line: None,
) -> list[Stage]:
    """Loads the recipes of stages. Raises `UserError` unless each can start from the weights of the one before.

    Args:
        paths: The recipes.
        overrides: Keys that are set in all of them.
        name: The name of the runs, before that of the recipe.
        on_ignored: As in `recipe.load`.
    """
    stages: list[Stage] = []
    for path in paths:
        stage = Stage(path, load_known(path, overrides, on_ignored), f"{name}-{name_of(path.stem)}".lstrip("-"))
        if same := next((each for each in stages if each.run_name == stage.run_name), None):
            raise UserError(f"{path} and {same.path} would be one run, {stage.run_name}; rename one of the recipes")
        stages.append(stage)
    for before, after in itertools.pairwise(stages):
        _check_next(before, after)
    return stages


def _check_next(before: Stage, after: Stage) -> None:
    """Raises `UserError` if a stage cannot start from the weights of the one before."""
    checkpoint = before.recipe.checkpoint
    if not checkpoint.enabled:
        raise UserError(f"{before.path}: checkpoint.enabled = false, but {after.path} starts from its checkpoint")
    if "://" in checkpoint.dir:
        raise UserError(
            f"{before.path}: checkpoint.dir = {checkpoint.dir!r} is a URL, and {after.path} starts from a local checkpoint; leave "
            "out checkpoint.dir"
        )
    if (initial := after.recipe.checkpoint.initial) != checkpoint.initial:  # equal: inherited, or of the command line
        raise UserError(
            f"{after.path}: checkpoint.initial = {initial!r}, but a stage starts from the weights of the one before, here those of "
            f"{before.path}; remove it"
        )
    old, new = before.recipe.model, after.recipe.model
    if type(old) is not type(new):
        raise UserError(
            f"{after.path}: model.name = {new.name!r}, but the weights of {before.path} are a {old.name} model"
        )
    shapes, needed = ({name: spec.shape for name, spec in each.parameters().items()} for each in (old, new))
    for field in different_fields(old, new):
        if (key := f"model.{field}") not in after.recipe.checkpoint.allow_changed:
            allow = f" or, if that is intended, set checkpoint.allow_changed = ['{key}']" if shapes == needed else ""
            raise UserError(
                f"{after.path}: {key} = {getattr(new, field)!r}, but the weights of {before.path} were trained with "
                f"{getattr(old, field)!r}; restore it{allow}"
            )
    if (encoding := after.recipe.tokenizer.encoding) != before.recipe.tokenizer.encoding:
        raise UserError(
            f"{after.path}: tokenizer.encoding = {encoding!r}, but the weights of {before.path} were trained with "
            f"{before.recipe.tokenizer.encoding!r}; restore it"
        )
