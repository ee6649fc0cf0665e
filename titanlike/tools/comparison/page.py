"""The comparison as one HTML file with its data, style and script. It opens from disk and needs no network."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.tools.comparison.differences import differences
from titanlike.tools.comparison.runs import ComparedRun
from titanlike.tools.comparison.series import Array, Series
from titanlike.tools.comparison.table import problems, ratio

SCRIPTS = ("page.js", "page_charts.js", "page_start.js")
DIGITS = 6  # significant, of a value
EXACT = 15  # of a step


def page(runs: Sequence[ComparedRun], *, refresh: float = 0.0) -> str:
    """Returns the page. It reloads itself every `refresh` seconds, unless that is 0."""
    baseline = runs[0].summary
    data = {
        "refresh": refresh,
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "runs": [
            {
                "name": run.name,
                "summary": asdict(run.summary) | {"ratio": ratio(run.summary, baseline)},
                "axis": {
                    "step": _list(run.axis.steps, EXACT),
                    "tokens": _list(run.axis.tokens, EXACT),
                    "seconds": _list(run.axis.seconds),
                },
                "series": {name: _series(series) for name, series in run.series.items()},
            }
            for run in runs
        ],
        "differences": [asdict(each) for each in differences(runs)],
        "problems": [note for run in runs for note in problems(run)],
    }
    names = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} others" if len(runs) > 3 else "")
    # A name such as "</script>" must not end the element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "title": escape(f"Comparison of {names}"),
        "style": _file("page.css"),
        "data": text,
        "script": "\n".join(map(_file, SCRIPTS)),
    }
    head, *sections = _file("page.html").split("{{")
    return head + "".join(parts[name] + rest for name, _, rest in (section.partition("}}") for section in sections))


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _series(series: Series) -> dict[str, Any]:
    found = {"x": _list(series.steps, EXACT), "y": _list(series.values)}
    if len(series.means):
        found |= {"mean_x": _list(series.mean_steps, EXACT), "means": _list(series.means)}
    return found


def _list(values: Array, digits: int = DIGITS) -> list[float | int | None]:
    """Returns numbers with few digits; integers without a decimal point, and None for those that are not finite."""
    finite = np.isfinite(values)
    return [
        None if not is_finite else int(value) if value.is_integer() else value
        for value, is_finite in zip(_rounded(np.where(finite, values, 0.0), digits), finite.tolist(), strict=True)
    ]


def _rounded(values: Array, digits: int) -> list[float]:
    size = np.abs(values)
    exponents = np.floor(np.log10(np.where(size > 0, size, 1.0)))
    scale = 10.0 ** np.minimum(digits - 1 - exponents, 300.0)
    rounded: list[float] = (np.round(values * scale) / scale).tolist()
    return rounded
