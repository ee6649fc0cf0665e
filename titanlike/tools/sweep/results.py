"""Results of a sweep: the ranked table, `sweep.json` and `best.toml`. Does not import Optuna."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import printable
from titanlike.recipe.load import parse_value
from titanlike.tools.sweep.config import Sweep, SweepPlan, as_text, recipe_text
from titanlike.utils.atomic_write import atomic_write_text

RESULTS = "sweep.json"


@dataclass(frozen=True)
class Trial:
    """A trial and its results so far, as `sweep.json` has them. Values that are not finite are None."""

    trial: int  # its number
    value: float | None
    settings: Mapping[str, str]  # of the searched keys, as on the command line
    step: int  # the last one with a value
    state: str  # running, complete, pruned or failed
    reason: str  # why it was pruned or failed
    run: str  # name
    values: Mapping[int, float | None]  # by step


def rank(trials: Sequence[Trial], direction: str) -> list[Trial]:
    """Returns complete trials, the best first, then pruned ones, failed ones and those that run."""
    sign = 1 if direction == "minimize" else -1
    order = ("complete", "pruned", "failed", "running")

    def key(trial: Trial) -> tuple[float, ...]:
        value = math.inf if trial.value is None else sign * trial.value
        # Pruned trials at different steps are not comparable: those that came further are first.
        return order.index(trial.state), -trial.step if trial.state == "pruned" else 0, value, trial.trial

    return sorted(trials, key=key)


def table(results: Mapping[str, Any]) -> str:
    """Formats the results of a sweep as a ranked table, with the reasons of pruned and failed trials below it."""
    keys = list(dict.fromkeys(key for trial in results["trials"] for key in trial["settings"]))
    rows = [("rank", "trial", results["metric"], *keys, "step", "state")]
    for position, trial in enumerate(results["trials"], 1):
        settings = [_short(trial["settings"].get(key, "")) for key in keys]
        value = "" if trial["value"] is None else f"{trial['value']:.6g}"
        place = str(position) if trial["state"] == "complete" else ""
        rows.append((place, str(trial["trial"]), value, *settings, str(trial["step"]), trial["state"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    reasons = {trial["trial"]: (trial["state"], trial["reason"]) for trial in results["trials"] if trial["reason"]}
    if reasons:
        lines += ["", *(f"trial {number} {state}: {reason}" for number, (state, reason) in sorted(reasons.items()))]
    if results["importance"]:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in results["importance"].items())
        lines += ["", f"importance: {shares}"]
    return "\n".join(map(printable, lines))  # it may be the file of another user


def trial_line(trial: Trial, trials: Sequence[Trial], sweep: Sweep) -> str:
    """Returns a line about a trial that has ended."""
    if trial.state != "complete":
        return f"trial {trial.trial} {trial.state}: {trial.reason}"
    best = rank(trials, sweep.direction)[0]
    place = "the best so far" if best == trial else f"the best is trial {best.trial}"
    return f"trial {trial.trial} complete: {sweep.metric} {trial.value:.6g}, {place}"


def settings_text(settings: Mapping[str, str]) -> str:
    """Formats the values of the searched keys."""
    return "  ".join(f"{key} = {_short(value)}" for key, value in settings.items())


def write_results(plan: SweepPlan, trials: Sequence[Trial], importance: Mapping[str, float]) -> None:
    """Writes `sweep.json` and the recipe of the best complete trial."""
    sweep, ranked = plan.sweep, rank(trials, plan.sweep.direction)
    facts = {name: getattr(sweep, name) for name in ("name", "metric", "direction", "seed")}
    results = {**facts, "file": str(plan.file), "importance": importance, "trials": [*map(asdict, ranked)]}
    atomic_write_text(plan.path / RESULTS, json.dumps(results, indent=1) + "\n", durable=False)
    if ranked and ranked[0].state == "complete":
        atomic_write_text(plan.path / "best.toml", best_recipe(plan, ranked[0]), durable=False)


def read_results(path: Path) -> dict[str, Any]:
    """Returns the content of a sweep's `sweep.json`."""
    try:
        results: dict[str, Any] = json.loads((path / RESULTS).read_bytes())
    except OSError:
        raise UserError(f"{path} is not the directory of a sweep: it has no {RESULTS}") from None
    except ValueError:
        raise UserError(
            f"{path / RESULTS} is damaged; start the sweep again, which writes it from its journal"
        ) from None
    return results


def best_recipe(plan: SweepPlan, trial: Trial) -> str:
    """Returns the recipe of a trial as TOML."""
    values = {
        key: next((value for value in plan.dimensions[key].values if as_text(value) == text), parse_value(text))
        for key, text in trial.settings.items()
    }
    comment = (
        f"# The recipe of trial {trial.trial}, the best of the sweep {plan.sweep.name}: {plan.sweep.metric} {trial.value:.6g}.\n"
        f"# Searched: {', '.join(f'{key} = {text}' for key, text in trial.settings.items())}\n"
    )
    return comment + recipe_text(plan, values)


def _short(text: str) -> str:
    """Shortens a number with many digits."""
    try:
        number = float(text)
    except ValueError:
        return text
    return text if len(text) <= 8 else f"{number:.4g}"
