"""The comparison as one picture: losses on top of each other, and bars of throughput with the ratios to the baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titanlike.tools.comparison.runs import ComparedRun
from titanlike.tools.comparison.table import ratio
from titanlike.tools.planning.figure import pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3f83e0", "#e0781a", "#2aa36a", "#c9498f", "#8d6bdb", "#d1493f", "#1f9fb5", "#9a8420", "#7c8796", "#b0683c")
LINES = ("-", "--", ":", "-.")  # of runs beyond the number of colors
MAX_NAME = 28


def draw(runs: Sequence[ComparedRun], path: Path) -> None:
    """Draws training loss, validation loss and throughput."""
    plt = pyplot()
    metrics = [name for name in ("loss", "validation_loss") if any(name in run.series for run in runs)]
    height = max(3.6, 1.2 + 0.3 * len(runs))
    figure, all_axes = plt.subplots(
        1, len(metrics) + 1, figsize=(4.6 * (len(metrics) + 1), height), dpi=140, layout="constrained", squeeze=False
    )
    for axes, metric in zip(all_axes[0], metrics, strict=False):
        _draw_losses(axes, runs, metric)
    _draw_throughput(all_axes[0][-1], runs)
    save(figure, path, "--png")
    plt.close(figure)


def _draw_losses(axes: "Axes", runs: Sequence[ComparedRun], metric: str) -> None:
    for index, run in enumerate(runs):
        if metric not in run.series:
            continue
        series, color = run.series[metric], COLORS[index % len(COLORS)]
        linestyle = LINES[index // len(COLORS) % len(LINES)]
        has_means = len(series.means) > 0
        axes.plot(
            series.steps, series.values, color=color, linestyle=linestyle, linewidth=0.6 if has_means else 1.4,
            alpha=0.35 if has_means else 1.0, label=None if has_means else _short(run.name),
            marker="o" if metric == "validation_loss" and len(series.steps) <= 50 else "", markersize=3,
        )  # fmt: skip
        if has_means:
            axes.plot(
                series.mean_steps, series.means, color=color, linestyle=linestyle, linewidth=1.2, label=_short(run.name)
            )
        bad = series.steps[~np.isfinite(series.values)]
        if len(bad):  # crosses at the top
            axes.plot(bad, np.full(len(bad), 0.98), "x", color=color, transform=axes.get_xaxis_transform())
    axes.set_title("training loss" if metric == "loss" else "validation loss", fontsize=10)
    axes.set_xlabel("step")
    axes.tick_params(labelsize=8)
    if len(runs) <= len(COLORS):
        axes.legend(frameon=False, fontsize=7)


def _draw_throughput(axes: "Axes", runs: Sequence[ComparedRun]) -> None:
    rates = [run.summary.tokens_per_second or 0.0 for run in runs]
    bars = axes.barh(range(len(runs)), rates, color=[COLORS[i % len(COLORS)] for i in range(len(runs))], height=0.7)
    ratios = [ratio(run.summary, runs[0].summary) for run in runs]
    labels = [
        "unknown" if not rate else f"{rate:,.0f}" + ("" if value is None else f"  {value:.2f}x")
        for rate, value in zip(rates, ratios, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_yticks(range(len(runs)), [_short(run.name) for run in runs], fontsize=8)
    axes.set_xlim(0, 1.45 * max(*rates, 1.0))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    axes.set_title(f"tokens/s, and ratio to {_short(runs[0].name)}", fontsize=10)


def _short(name: str) -> str:
    # matplotlib interprets $ as mathematics, and leaves out a label that starts with an underscore.
    text = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."
    return text.replace("$", r"\$").replace("_", "\u200b_", 1) if text.startswith("_") else text.replace("$", r"\$")
