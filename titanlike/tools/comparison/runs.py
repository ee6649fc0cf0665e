"""Runs to compare: found below directories, read, and summarized."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tomli

from titanlike.config import UserError
from titanlike.config.base import nearest, printable, shown
from titanlike.tools.comparison import series
from titanlike.tools.comparison.series import SKIPPED, TRAINING, VALIDATION, Array, Records, Series
from titanlike.tools.metrics_file import read_lines
from titanlike.utils.file_lock import is_locked

METRICS, RECIPE = "metrics.jsonl", "recipe.toml"
OF_A_START = ("started", "command", "platform", "resumed_step")  # keys of environment.json that are not compared
MAX_BUCKETS, MIN_BUCKETS = 1000, 100  # per curve
TOTAL_BUCKETS = 12_000  # per metric, of all runs: a page of 20 runs stays below 5 MB


@dataclass(frozen=True)
class Summary:
    """What a run has reached. None is unknown or not finite. Throughput is of all devices together."""

    state: str
    """`running`, `complete`, `stopped`, or `unknown` without a recipe."""
    step: int
    num_steps: int | None
    tokens: int | None
    training_loss: float | None
    validation_loss: float | None
    best_validation_loss: float | None
    best_validation_step: int | None
    tokens_per_second: float | None
    """Median over the records, without the first one, which includes the warmup."""
    mfu: float | None
    peak_memory_gib: float | None
    wall_seconds: float | None
    skipped_steps: int
    damaged_lines: tuple[int, ...]


@dataclass(frozen=True)
class ComparedRun:
    """A run as it is compared."""

    name: str
    path: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    problem: str
    """A file that could not be read, or an empty string."""
    summary: Summary
    series: dict[str, Series]
    axis: dict[str, Array]
    """Steps, and the tokens and hours at them."""


def find(arguments: Sequence[Path]) -> list[Path]:
    """Returns the runs that the arguments name: directories of runs, directories that contain some, and metrics files."""
    found = []
    for path in arguments:
        if not path.exists():
            choices = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
            near = nearest(path.name, choices)
            hint = f"did you mean {path.parent / near}?" if near else "give the directory of a run, such as runs/NAME"
            raise UserError(f"{shown(str(path))} does not exist; {hint}")
        if not path.is_dir() and not (path.is_file() and path.suffix == ".jsonl"):
            raise UserError(f"{shown(str(path))} is not a run: give the directory of a run, or its {METRICS}")
        if path.is_file() or is_run(path):
            found.append(path)
            continue
        inner = sorted(each for each in path.iterdir() if is_run(each))
        if not inner:
            raise UserError(
                f"{shown(str(path))} is not the directory of a run, and contains none: it has no {METRICS}; "
                "give runs/NAME, or the directory that contains the runs"
            )
        found += inner
    unique: dict[Path, Path] = {}
    for path in found:
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def is_run(path: Path) -> bool:
    """Whether a directory is a run directory."""
    return any((path / name).is_file() for name in (METRICS, RECIPE))


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Returns the last part of each path, with the parts before it where that is not unique."""
    parts = [path.resolve().parts for path in paths]
    counts = [1] * len(parts)
    while True:
        names = ["/".join(part[-count:]) for part, count in zip(parts, counts, strict=True)]
        repeated = [i for i, name in enumerate(names) if names.count(name) > 1 and counts[i] < len(parts[i])]
        if not repeated:
            return [printable(name) for name in names]  # they go to a terminal and into a page
        for i in repeated:
            counts[i] += 1


def load(paths: Sequence[Path]) -> list[ComparedRun]:
    """Returns the runs, the first one of which is the baseline."""
    num_buckets = max(MIN_BUCKETS, min(MAX_BUCKETS, TOTAL_BUCKETS // max(len(paths), 1)))
    return [_load(path, name, num_buckets) for path, name in zip(paths, unique_names(paths), strict=True)]


def _load(path: Path, name: str, num_buckets: int) -> ComparedRun:
    metrics = path if path.is_file() else path / METRICS
    try:
        records, damaged_lines = read_lines(metrics)
    except OSError as error:
        raise UserError(f"{metrics} cannot be read: {error.strerror}") from None
    recipe, recipe_problem = _read_values(path / RECIPE)
    environment, environment_problem = _read_values(path / "environment.json")
    series.add_wall_time(records)
    training, validation = series.of_kind(records, TRAINING), series.of_kind(records, VALIDATION)
    last = [*training[-1:], *validation[-1:]]
    step = max((record["step"] for record in last), default=0)
    section = recipe.get("training")
    num_steps = section.get("steps") if isinstance(section, dict) else None
    state = "unknown" if num_steps is None else "complete" if step >= num_steps else "stopped"
    losses = [(each[VALIDATION], each["step"]) for each in validation if each[VALIDATION] is not None]
    best_loss, best_step = min(losses, default=(None, None))
    rates, utilization = _values(training[1:], "tokens_per_second"), _values(training[1:], "mfu")
    summary = Summary(
        state="running" if is_locked(path / "lock") else state,
        step=step,
        num_steps=num_steps,
        tokens=training[-1].get("tokens") if training else None,
        training_loss=training[-1][TRAINING] if training else None,
        validation_loss=validation[-1][VALIDATION] if validation else None,
        best_validation_loss=best_loss,
        best_validation_step=best_step,
        tokens_per_second=median(rates) if rates else None,
        mfu=median(utilization) if utilization else None,
        peak_memory_gib=max(_values(training, "memory_gib"), default=0.0) or None,
        wall_seconds=max(_values(last, "seconds"), default=None),
        skipped_steps=len({record["step"] for record in series.of_kind(records, SKIPPED)}),
        damaged_lines=tuple(damaged_lines),
    )
    return ComparedRun(
        name=name,
        path=path,
        recipe=recipe,
        environment=environment,
        problem=recipe_problem or environment_problem,
        summary=summary,
        series=series.curves(training, validation, num_buckets),
        axis=series.x_axis(training, num_buckets),
    )


def _values(records: Records, name: str) -> list[float]:
    return [record[name] for record in records if record.get(name) is not None]


def _read_values(path: Path) -> tuple[dict[str, Any], str]:
    """Returns the content of a TOML or JSON file, empty if it is missing, and the problem of a file that is not valid."""
    try:
        text = path.read_bytes().decode()
        values = tomli.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, printable(f"{path} cannot be read: {error}")
    return (values, "") if isinstance(values, dict) else ({}, f"{path} cannot be read: it is not a table")


@dataclass(frozen=True)
class KeyDifference:
    """A key and its value in each run, as in TOML; None where a run does not have it."""

    section: str
    key: str
    values: tuple[str | None, ...]

    @property
    def name(self) -> str:
        """The dotted key."""
        return f"{self.section}.{self.key}".removeprefix(".")


def differences(runs: Sequence[ComparedRun]) -> list[KeyDifference]:
    """Returns the keys of recipes and environments whose values differ, in the order of the recipes. Runs without a recipe, such
    as a metrics file, are left out of the comparison."""
    tables = [_flat(run) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    sections = list(dict.fromkeys(section for section, _ in names))
    found = []
    for section, key in sorted(names, key=lambda name: sections.index(name[0])):
        values = tuple(table.get((section, key)) for table in tables)
        sources = [run.environment if section == "environment" else run.recipe for run in runs]
        if len({value for value, source in zip(values, sources, strict=True) if source}) > 1:
            found.append(KeyDifference(printable(section), printable(key), values))
    return found


def _flat(run: ComparedRun) -> dict[tuple[str, str], str]:
    """Returns the values of a run by section and key, without its name."""
    values: dict[tuple[str, str], Any] = {}
    for name, value in {**run.recipe, "environment": run.environment}.items():
        values |= (
            {(name, key): inner for key, inner in value.items()} if isinstance(value, dict) else {("", name): value}
        )
    ignored = [("run", "name"), *(("environment", key) for key in OF_A_START)]
    return {
        name: printable(json.dumps(value, ensure_ascii=False, default=str))
        for name, value in values.items()
        if name not in ignored
    }
