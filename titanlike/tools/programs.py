"""Recipes of any program. One that is not shipped may have sections of its own, and resolves its recipe. Imports no torch."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomli
from pydantic import TypeAdapter

from titanlike.config import UserError
from titanlike.config.effect import idle_keys
from titanlike.config.shipped import PROGRAMS, REPOSITORY
from titanlike.distributed import launch_config
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.recipe.mlm import MlmRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.run.start import program_of

SHIPPED: dict[Path, type[PretrainRecipe]] = {
    PROGRAMS / "pretrain.py": PretrainRecipe,
    PROGRAMS / "mlm.py": MlmRecipe,
    PROGRAMS / "seq2seq.py": Seq2SeqRecipe,
    PROGRAMS / "finetune.py": FinetuneRecipe,
    PROGRAMS / "dpo.py": DpoRecipe,
    PROGRAMS / "distill.py": DistillRecipe,
}

ONLY_STEPS: dict[str, Any] = {
    "validation.interval": 0, "evaluation.interval": 0, "sample.interval": 0, "sample.tokens": 0, "checkpoint.enabled": False,
    "checkpoint.export": "none", "metrics.trackers": [], "metrics.tensorboard_dir": "",
}  # fmt: skip
"""Keys of a short run that trains, and does nothing else."""


def recipe_types() -> dict[str, type[PretrainRecipe]]:
    """Returns the recipe types of the shipped programs by name."""
    return {program.stem: recipe_type for program, recipe_type in SHIPPED.items()}


def load_known(
    path: Path, overrides: Mapping[str, str], on_ignored: Callable[[str], None] = lambda line: None
) -> PretrainRecipe:
    """Loads a recipe of any program, with the sections that the shipped recipes have, too. For `on_ignored`, see `load`."""
    values = dict(overrides)
    program = program_of(path, values.pop("program", None))
    if program in SHIPPED:
        return load(SHIPPED[program], path, values, on_ignored=on_ignored)
    return known_sections(run_program(program, str(path), *options_of(overrides), "--resolved"))


def effective_overrides(path: Path, overrides: Mapping[str, str]) -> dict[str, str]:
    """Returns overrides of a shipped program's recipe without those that have no effect beside the others, as a trial of a sweep
    may have."""
    idle: set[str] = set()
    with suppress(UserError):  # reported where the recipe is used
        if program_of(path, overrides.get("program")) in SHIPPED:
            idle = {each.key for each in idle_keys(load_known(path, overrides))} & overrides.keys()
    kept = {key: value for key, value in overrides.items() if key not in idle}
    return effective_overrides(path, kept) if idle else kept


def options_of(values: Mapping[str, Any]) -> list[str]:
    """Returns the options of a command line that set these keys of a recipe."""
    return [f"--{key}={toml(value)}" for key, value in values.items()]


def toml(value: Any) -> str:
    """Returns the value of a key as a command line has it."""
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


def run_program(program: Path, *arguments: str) -> str:
    """Returns the output of a recipe's program, or raises its error."""
    variables = launch_config.child_environment({"PYTHONPATH": str(REPOSITORY)})
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise UserError("\n".join(line.removeprefix("error: ") for line in done.stderr.splitlines()))
    return done.stdout


def known_sections(resolved: str) -> PretrainRecipe:
    """Returns the sections of a resolved recipe that the shipped recipes have too."""
    values = tomli.loads(resolved)
    recipe_type: type[PretrainRecipe] = PretrainRecipe
    if "lora" in values:
        by_section = {"preference": DpoRecipe, "distillation": DistillRecipe}
        recipe_type = next((by_section[name] for name in by_section if name in values), FinetuneRecipe)
    elif "mlm" in values:
        recipe_type = MlmRecipe
    elif "seq2seq" in values:
        recipe_type = Seq2SeqRecipe
    known = {field.name for field in fields(recipe_type)}
    values = {key: value for key, value in values.items() if key in known}
    return TypeAdapter(recipe_type).validate_json(json.dumps(values))
