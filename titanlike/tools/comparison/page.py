"""The comparison as one HTML file with its data, style and scripts. It opens from disk and needs no network."""

import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from titanlike.tools.comparison.runs import ComparedRun, differences
from titanlike.tools.comparison.series import Array, Series
from titanlike.tools.comparison.table import COLUMNS, problems
from titanlike.tools.html_page import html_page


def page(runs: Sequence[ComparedRun], *, refresh: float = 0.0) -> str:
    """Returns the page. It reloads itself every `refresh` seconds, unless that is 0."""
    data = {
        "refresh": refresh,
        "runs": [
            {
                "name": run.name,
                "axis": {name: _list(values) for name, values in run.axis.items()},
                "series": {name: _series(series) for name, series in run.series.items()},
            }
            for run in runs
        ],
    }
    names = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} others" if len(runs) > 3 else "")
    status = escape(f"{len(runs)} runs, baseline {runs[0].name}; written {time.strftime('%Y-%m-%d %H:%M:%S')}")
    reload = f' <label><input type="checkbox" id="reload"> reload every {refresh:g} s</label>' if refresh else ""
    cells = ([run.name, *(cell(run.summary, runs[0].summary) for cell in COLUMNS.values())] for run in runs)
    rows = []
    for each in differences(runs):  # values that differ from the baseline's are highlighted
        marks = ["" if value == each.values[0] else " class=changed" for value in each.values]
        values = [
            f"<td{mark}>{escape(value or 'not set')}</td>" for mark, value in zip(marks, each.values, strict=True)
        ]
        rows.append("".join([f"<th>{escape(each.name)}</th>", *values]))
    parts = {
        "title": escape(f"Comparison of {names}"),
        "status": status + reload,
        "summary": _table(["run", *COLUMNS], ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)),
        "problems": "".join(f"<li>{escape(note)}</li>" for run in runs for note in problems(run)),
        "differences": _table(["key", *(run.name for run in runs)], rows),
    }
    plotly = files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    return html_page(Path(__file__).parent, parts, data, plotly)


def _table(names: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _series(series: Series) -> dict[str, Any]:
    found = {"x": _list(series.steps), "y": _list(series.values)}
    if len(series.means):
        found |= {"mean_x": _list(series.mean_steps), "means": _list(series.means)}
    return found


def _list(values: Array) -> list[float | int | None]:
    """Returns integers without a decimal point, other numbers with six digits, and None for those that are not finite."""
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() else float(f"{value:.6g}")
        for value in values.tolist()
    ]
