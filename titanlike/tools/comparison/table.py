"""The comparison as tables for a terminal, and as data."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from titanlike.config.base import shown
from titanlike.tools.comparison.runs import ComparedRun, KeyDifference, Summary, differences

Cell = Callable[[Summary, Summary], str]  # of a run's summary and the baseline's
MAX_NAME = 32
STATE_STYLES = {"running": "green", "complete": "", "stopped": "yellow", "unknown": ""}
UNKNOWN = "-"

COLUMNS: dict[str, Cell] = {
    "state": lambda run, _: run.state,
    "steps": lambda run, _: _progress(run),
    "tokens": lambda run, _: count(run.tokens),
    "train loss": lambda run, _: number(run.training_loss, ".4f"),
    "val loss": lambda run, _: number(run.validation_loss, ".4f"),
    "best val": lambda run, _: number(run.best_validation_loss, ".4f"),
    "at step": lambda run, _: number(run.best_validation_step, ","),
    "tokens/s": lambda run, _: number(run.tokens_per_second, ",.0f"),
    "ratio": lambda run, baseline: number(ratio(run, baseline), ".2f"),
    "MFU": lambda run, _: number(run.mfu, ".1%"),
    "GiB": lambda run, _: number(run.peak_memory_gib, ",.2f"),
    "wall time": lambda run, _: (
        UNKNOWN if run.wall_seconds is None else str(timedelta(seconds=round(run.wall_seconds)))
    ),
}
# The columns of two tables, for a terminal that is too narrow for one.
NARROW = (
    ("state", "steps", "tokens", "wall time", "tokens/s", "ratio"),
    ("train loss", "val loss", "best val", "at step", "MFU", "GiB"),
)


def render(runs: Sequence[ComparedRun], console: Console) -> RenderableType:
    """Returns the tables of the runs, their recipe differences and what could not be read, to fit the width of the console."""
    whole = _table(runs, COLUMNS)
    fits = Measurement.get(console, console.options.update(max_width=1000), whole).maximum <= console.width
    blank = Text()
    narrow = [{name: COLUMNS[name] for name in names} for names in NARROW]
    parts: list[RenderableType] = [whole] if fits else [_table(runs, narrow[0]), blank, _table(runs, narrow[1])]
    found = differences(runs)
    if found:
        parts += [blank, _differences_table(found, [run.name for run in runs])]
    notes = [Text(note, style="yellow") for run in runs for note in problems(run)]
    return Group(*parts, *([blank, *notes] if notes else []))


def problems(run: ComparedRun) -> list[str]:
    """Returns what is wrong with the files of a run, and the steps that it skipped."""
    notes = [f"{run.name}: {run.problem}"] if run.problem else []
    damaged = run.summary.damaged_lines
    if damaged:
        text = "line is" if len(damaged) == 1 else "lines are"
        named = ", ".join(f"{line:,}" for line in damaged[:5]) + (", ..." if len(damaged) > 5 else "")
        notes.append(f"{run.name}: {len(damaged):,} {text} damaged in its metrics: {named}")
    if run.summary.skipped_steps:
        notes.append(f"{run.name}: skipped the update of {run.summary.skipped_steps:,} steps")
    return notes


def as_json(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Returns the comparison as data. The first run is the baseline of the ratios."""
    baseline = runs[0].summary
    rows = [
        {"run": run.name, "path": str(run.path), **asdict(run.summary), "ratio": ratio(run.summary, baseline)}
        | ({"problem": run.problem} if run.problem else {})
        for run in runs
    ]
    found = {
        each.name: {run.name: value for run, value in zip(runs, each.values, strict=True)} for each in differences(runs)
    }
    return {"baseline": runs[0].name, "runs": rows, "differences": found}


def ratio(run: Summary, baseline: Summary) -> float | None:
    """Returns the throughput relative to the baseline's."""
    if run.tokens_per_second is None or not baseline.tokens_per_second:
        return None
    return run.tokens_per_second / baseline.tokens_per_second


def count(value: float | None) -> str:
    """Formats a number of tokens with three digits, such as 1.23B."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value is not None and value >= 0.9995 * factor:
            return f"{value / factor:#.3g}".rstrip(".") + suffix
    return number(value, ".0f")


def _progress(run: Summary) -> str:
    is_known = run.num_steps and run.state != "complete"
    return f"{run.step:,}" + (f"/{run.num_steps:,}" if is_known else "")


def number(value: float | None, format_spec: str) -> str:
    """Formats a number that may be unknown."""
    return UNKNOWN if value is None else format(value, format_spec)


def _table(runs: Sequence[ComparedRun], columns: dict[str, Cell]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("run", overflow="ellipsis", no_wrap=True, max_width=MAX_NAME, min_width=8)
    for name in columns:
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for run in runs:
        cells = [Text(cell(run.summary, runs[0].summary)) for cell in columns.values()]
        table.add_row(Text(run.name), *cells, style=STATE_STYLES[run.summary.state] if "state" in columns else "")
    return table


def _differences_table(found: Sequence[KeyDifference], names: Sequence[str]) -> Table:
    table = Table(
        title="Differences of the recipes and environments", title_justify="left", title_style="bold", box=None,
        pad_edge=False, show_header=False,
    )  # fmt: skip
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = None
    for each in found:
        if each.section != section:
            section = each.section
            table.add_row(Text(f"[{section}]" if section else "", style="dim"), "")
        table.add_row(Text(f"  {each.key}" if section else each.key), Text(_by_value(each, names)))
    return table


def _by_value(difference: KeyDifference, names: Sequence[str]) -> str:
    """Returns the values, the baseline's first, each with the runs that have it."""
    groups: dict[str | None, list[str]] = {}
    for value, name in zip(difference.values, names, strict=True):
        groups.setdefault(value, []).append(name)
    parts = []
    for value, members in groups.items():
        listed = ", ".join(members[:3]) + (f" and {len(members) - 3} others" if len(members) > 3 else "")
        parts.append(f"{'not set' if value is None else shown(value)} ({listed})")
    return "; ".join(parts)
