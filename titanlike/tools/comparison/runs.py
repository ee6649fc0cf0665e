"""Runs to compare: found below directories, read, and summarized."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from titanlike.config import UserError
from titanlike.config.base import nearest, printable, shown
from titanlike.tools.comparison.reader import SKIPPED, TRAINING, VALIDATION, MetricsReader
from titanlike.tools.comparison.series import Columns, Series, XAxis, curves, without_repeated_steps
from titanlike.utils.file_lock import is_locked

METRICS, RECIPE = "metrics.jsonl", "recipe.toml"
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
    axis: XAxis


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


class Runs:
    """Reads runs. Those that are read again continue where they were."""

    def __init__(self) -> None:
        self._readers: dict[Path, MetricsReader] = {}

    def load(self, paths: Sequence[Path], *, keep: bool) -> list[ComparedRun]:
        """Returns the runs, the first one of which is the baseline. `keep` retains what is needed to read them again quickly."""
        num_buckets = max(MIN_BUCKETS, min(MAX_BUCKETS, TOTAL_BUCKETS // max(len(paths), 1)))
        runs = []
        for path, name in zip(paths, unique_names(paths), strict=True):
            reader = self._readers.get(path) or MetricsReader(path if path.is_file() else path / METRICS)
            if keep:
                self._readers[path] = reader
            try:
                columns = reader.read()
            except OSError as error:
                raise UserError(f"{reader.path} cannot be read: {error.strerror}") from None
            runs.append(_make_run(path, name, columns, reader.damaged_lines, num_buckets))
        return runs


def _make_run(path: Path, name: str, columns: Columns, damaged_lines: Sequence[int], num_buckets: int) -> ComparedRun:
    recipe, recipe_problem = _read_values(path / RECIPE)
    environment, environment_problem = _read_values(path / "environment.json")
    records = without_repeated_steps(columns)
    training = recipe.get("training", {})
    num_steps = training.get("steps") if isinstance(training, dict) else None
    summary = _summarize(records, num_steps if isinstance(num_steps, int) else None, path, damaged_lines)
    series, axis = curves(records, num_buckets)
    return ComparedRun(name, path, recipe, environment, recipe_problem or environment_problem, summary, series, axis)


def _summarize(records: dict[int, Columns], num_steps: int | None, path: Path, damaged_lines: Sequence[int]) -> Summary:
    training, validation = records[TRAINING], records[VALIDATION]
    step = int(max(_last(training["step"]) or 0, _last(validation["step"]) or 0))
    if is_locked(path / "lock"):
        state = "running"
    else:
        state = "unknown" if num_steps is None else "complete" if step >= num_steps else "stopped"
    losses = validation["validation_loss"]
    finite = np.isfinite(losses)
    best = int(np.where(finite, losses, np.inf).argmin()) if finite.any() else None
    tokens, seconds = _last(training["tokens"]), [*training["seconds"][-1:], *validation["seconds"][-1:]]
    return Summary(
        state=state,
        step=step,
        num_steps=num_steps,
        tokens=None if tokens is None else int(tokens),
        training_loss=_last(training["loss"]),
        validation_loss=_last(losses),
        best_validation_loss=None if best is None else float(losses[best]),
        best_validation_step=None if best is None else int(validation["step"][best]),
        tokens_per_second=_median(training["tokens_per_second"][1:]),
        mfu=_median(training["mfu"][1:]),
        peak_memory_gib=_number(np.nanmax(training["memory_gib"])) if _median(training["memory_gib"]) else None,
        wall_seconds=max((float(each) for each in seconds if math.isfinite(each)), default=None),
        skipped_steps=len(np.unique(records[SKIPPED]["step"])),
        damaged_lines=tuple(damaged_lines),
    )


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _last(values: Any) -> float | None:
    return _number(values[-1]) if len(values) else None


def _median(values: Any) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


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
