"""The comparison as one picture: losses on top of each other, and bars of throughput with the ratios to the baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.tools.comparison.runs import ComparedRun
from titanlike.tools.comparison.series import Series
from titanlike.tools.comparison.table import ratio
from titanlike.tools.output_files import writing

COLORS = ("#3f83e0", "#e0781a", "#2aa36a", "#c9498f", "#8d6bdb", "#d1493f", "#1f9fb5", "#9a8420", "#7c8796", "#b0683c")
TITLES = {"loss": "training loss", "validation_loss": "validation loss"}
MAX_NAME = 28


def draw(runs: Sequence[ComparedRun], path: Path) -> None:
    """Draws training loss, validation loss and throughput."""
    import matplotlib

    matplotlib.use("Agg")  # without a display
    from matplotlib import pyplot as plt

    metrics = [name for name in TITLES if any(name in run.series for run in runs)]
    size = (4.6 * (len(metrics) + 1), max(3.6, 1.2 + 0.3 * len(runs)))
    figure, all_axes = plt.subplots(1, len(metrics) + 1, figsize=size, dpi=140, layout="constrained", squeeze=False)
    colors = [COLORS[index % len(COLORS)] for index in range(len(runs))]
    names = [_short(run.name) for run in runs]
    for axes, metric in zip(all_axes[0], metrics, strict=False):
        for run, name, color in zip(runs, names, colors, strict=True):
            if metric in run.series:
                _draw_curve(axes, run.series[metric], name, color, has_markers=metric == "validation_loss")
        axes.set_title(TITLES[metric], fontsize=10)
        axes.set_xlabel("step")
        axes.tick_params(labelsize=8)
        if len(runs) <= len(COLORS):
            axes.legend(frameon=False, fontsize=7)
    _draw_throughput(all_axes[0][-1], runs, names, colors)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        with writing(path, "--png"):
            figure.savefig(path, bbox_inches="tight")
    finally:
        plt.close(figure)


def _draw_curve(axes: Any, series: Series, name: str, color: str, *, has_markers: bool) -> None:
    """Draws the values; of many, the means over them. Values that are not finite are crosses at the top."""
    marker = "o" if has_markers and len(series.steps) <= 50 else ""
    if len(series.means):
        axes.plot(series.steps, series.values, color=color, linewidth=0.6, alpha=0.35)
        axes.plot(series.mean_steps, series.means, color=color, linewidth=1.2, label=name)
    else:
        axes.plot(series.steps, series.values, color=color, linewidth=1.4, label=name, marker=marker, markersize=3)
    bad = series.steps[~np.isfinite(series.values)]
    axes.plot(bad, np.full(len(bad), 0.98), "x", color=color, transform=axes.get_xaxis_transform())


def _draw_throughput(axes: Any, runs: Sequence[ComparedRun], names: Sequence[str], colors: Sequence[str]) -> None:
    rates = [run.summary.tokens_per_second or 0.0 for run in runs]
    bars = axes.barh(range(len(runs)), rates, color=colors, height=0.7)
    ratios = [ratio(run.summary, runs[0].summary) for run in runs]
    labels = [
        "unknown" if not rate else f"{rate:,.0f}" + ("" if value is None else f"  {value:.2f}x")
        for rate, value in zip(rates, ratios, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_yticks(range(len(runs)), names, fontsize=8)
    axes.set_xlim(0, 1.45 * max(*rates, 1.0))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    axes.set_title(f"tokens/s, and ratio to {names[0]}", fontsize=10)


def _short(name: str) -> str:
    # matplotlib interprets $ as mathematics, and leaves out a label that starts with an underscore.
    text = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."
    return text.replace("$", r"\$").replace("_", "\u200b_", 1) if text.startswith("_") else text.replace("$", r"\$")
