"""Pictures of a plan: memory over one step, and scaling over GPUs. Does not import torch."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from titanlike.tools.figure import pyplot, save
from titanlike.tools.planning.memory import Usage
from titanlike.tools.planning.plan import GIB, Plan
from titanlike.tools.planning.report import CATEGORIES

# Okabe and Ito's palette, which color-blind readers can distinguish.
COLORS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999")
MAX_LABELS = 24


def draw_memory(plan: Plan, path: Path) -> None:
    """Draws the memory of the pipeline rank that needs most over one step, by category."""
    plt = pyplot()
    memory = plan.memory[plan.worst_rank]
    names = [field.name for field in fields(Usage)]
    rows = [[getattr(moment.usage, name) / GIB for moment in memory.moments] for name in names]
    used = [(name, row) for name, row in zip(names, rows, strict=True) if any(row)]
    figure, axes = plt.subplots(figsize=(9, 4.4), dpi=140)
    colors = [COLORS[names.index(name)] for name, _ in used]
    # A moment is the maximum of a phase, so each phase is one step of the staircase.
    edges = list(range(len(memory.moments) + 1))
    stacked = [[*row, row[-1]] for _, row in used]
    labels = [CATEGORIES[name] for name, _ in used]
    axes.stackplot(edges, stacked, labels=labels, colors=colors, step="post", linewidth=0)
    axes.axhline(plan.available / GIB, color="black", linewidth=1, linestyle="--")
    axes.annotate(
        f"available on {plan.hardware.name}: {plan.available / GIB:.1f} GiB", (0, plan.available / GIB), xytext=(3, 3),
        textcoords="offset points", fontsize=8,
    )  # fmt: skip
    peak = memory.moments.index(memory.peak)
    axes.annotate(
        f"peak {memory.allocated / GIB:.1f} GiB allocated, {memory.reserved / GIB:.1f} reserved",
        (peak + 0.5, memory.allocated / GIB),
        xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8,
    )  # fmt: skip
    stride = -(-len(memory.moments) // MAX_LABELS)
    ticks = range(0, len(memory.moments), stride)
    axes.set_xticks([tick + 0.5 for tick in ticks], [memory.moments[tick].label for tick in ticks], fontsize=7)
    plt.setp(axes.get_xticklabels(), rotation=60, ha="right", rotation_mode="anchor")
    axes.set(
        xlim=(0, len(memory.moments)),
        ylim=(0, 1.12 * max(plan.available, memory.allocated) / GIB),
        ylabel="GiB per GPU",
    )
    job = plan.job
    rank = f", pipeline rank {plan.worst_rank}" if len(plan.memory) > 1 else ""
    axes.set_title(
        f"{job.recipe.model.label()} on {job.num_gpus:,} x {plan.hardware.name}: memory over one step{rank}",
        fontsize=10,
    )
    handles, names_shown = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], names_shown[::-1], frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    save(figure, path, "--figure")


def draw_scaling(plans: Sequence[Plan], path: Path) -> None:
    """Draws throughput, duration and cost over the number of GPUs."""
    from matplotlib.ticker import LogLocator, NullFormatter

    plt = pyplot()
    curves: list[tuple[str, Callable[[Plan], float]]] = [
        ("tokens/s per GPU", lambda plan: plan.tokens_per_second_per_gpu),
        ("hours of the run", lambda plan: plan.hours),
    ]
    if all(plan.dollars is not None for plan in plans):
        curves.append(("dollars of the run", lambda plan: plan.dollars or 0.0))
    figure, all_axes = plt.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.2), dpi=140)
    counts = [plan.job.num_gpus for plan in plans]
    for axes, (label, value) in zip(all_axes, curves, strict=True):
        axes.plot(counts, [value(plan) for plan in plans], "-", color=COLORS[0], linewidth=1.5)
        for fits, style, text in ((True, "o", ""), (False, "x", "does not fit in memory")):
            points = [(plan.job.num_gpus, value(plan)) for plan in plans if plan.fits == fits]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=COLORS[0] if fits else COLORS[5], label=text)
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.set(xlabel="GPUs", title=label)
        axes.title.set_fontsize(10)
        if label.startswith("hours"):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(0, 1.15 * max(value(plan) for plan in plans))
    if not all(plan.fits for plan in plans):
        all_axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{plans[0].job.recipe.model.label()} on {plans[0].hardware.name}", fontsize=11)
    figure.tight_layout()
    save(figure, path, "--figure")
