"""Differences of runs: the keys of their recipes, and of their environments, whose values are not all equal."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlike.config.base import printable
from titanlike.tools.comparison.runs import ComparedRun

IGNORED = {("run", "name")}  # of every run its own
ENVIRONMENT = (
    "device",
    "processes",
    "threads",
    "host",
    "torch",
    "cuda",
    "python",
    "titanlike",
    "git_commit",
    "git_changes",
)


@dataclass(frozen=True)
class KeyDifference:
    """A key and its value in each run, as in TOML; None where a run does not have it."""

    section: str
    key: str
    values: tuple[str | None, ...]

    @property
    def name(self) -> str:
        """The dotted key."""
        return f"{self.section}.{self.key}" if self.section else self.key


def differences(runs: Sequence[ComparedRun]) -> list[KeyDifference]:
    """Returns the keys that differ, in the order of the recipes. Runs without a recipe, such as a metrics file, are left out of
    the comparison."""
    tables = [_flat(run) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    sections = dict.fromkeys(section for section, _ in names)
    found = []
    for section, key in sorted(names, key=lambda name: list(sections).index(name[0])):
        values = [table.get((section, key)) for table in tables]
        source = [run.environment if section == "environment" else run.recipe for run in runs]
        known = {value for value, values_of_run in zip(values, source, strict=True) if values_of_run}
        if len(known) > 1:
            found.append(KeyDifference(printable(section), printable(key), tuple(values)))
    return found


def _flat(run: ComparedRun) -> dict[tuple[str, str], str]:
    """Returns the values of a run by section and key. The program is `recipe` in a recipe."""
    values: dict[tuple[str, str], str] = {}
    for name, value in run.recipe.items():
        if isinstance(value, dict):
            values |= {(name, key): _text(inner) for key, inner in value.items() if (name, key) not in IGNORED}
        else:
            values["", "program" if name == "recipe" else name] = _text(value)
    environment = {key: run.environment[key] for key in ENVIRONMENT if run.environment.get(key) is not None}
    return values | {("environment", key): _text(value) for key, value in environment.items()}


def _text(value: Any) -> str:
    return printable(json.dumps(value, ensure_ascii=False, default=str))
