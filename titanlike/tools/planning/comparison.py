"""Tables that compare plans: the result of a search, and scaling over GPUs. Does not import torch."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from titanlike.tools.planning.advice import is_overhead
from titanlike.tools.planning.changes import text_of
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.plan import GIB, Plan
from titanlike.tools.planning.report import as_json, number, table
from titanlike.tools.planning.scaling import Mode, Point
from titanlike.tools.planning.search import SearchResult

MAX_BAR = 24
WIDTH_OF_NUMBERS = 64  # of a line with all columns, without the bars

MODES = {
    "strong": "strong scaling: the global batch of the recipe on any number of GPUs; --scaling weak makes it proportional to them",
    "weak": "weak scaling: the global batch is proportional to the number of GPUs; --scaling strong keeps that of the recipe",
}


def print_search(result: SearchResult, original: Plan | None, console: Console) -> None:
    """Prints the best candidates of a search."""
    console.print(counts_line(result))
    if not result.best:
        return
    found = table("Best candidates", "#", "layout", "recompute", "float8", "batch", "GiB", "tok/s/GPU")
    for column in range(1, 4):
        found.columns[column].justify = "left"
    for place, candidate in enumerate(result.best, 1):
        plan, recipe = candidate.plan, candidate.plan.job.recipe
        found.add_row(
            str(place),
            layout_text(plan),
            recipe.activation_checkpoint.mode,
            "no" if recipe.float8.scaling == "none" else "yes",
            f"{plan.job.num_microbatches} x {plan.job.sequences}",
            f"{plan.reserved / GIB:.1f}",
            f"{plan.tokens_per_second_per_gpu:,.0f}",
        )
    console.print()
    console.print(found)
    experts = ", EP: expert" if any(candidate.plan.job.layout.expert > 1 for candidate in result.best) else ""
    console.print(
        f"TP: tensor, CP: context, FSDP: shard, HSDP: replicate x shard{experts}, PP: pipeline. Batch: micro-batches x sequences."
    )
    console.print()
    limiting = table("What limits them", "#", "largest part of the step, and its largest overhead")
    limiting.columns[1].justify = "left"
    for place, candidate in enumerate(result.best, 1):
        limiting.add_row(str(place), limit_text(candidate.plan))
    console.print(limiting)
    console.print()
    best = result.best[0]
    if original is not None:
        gain = best.plan.tokens_per_second / original.tokens_per_second - 1
        does_not_fit = "" if original.fits else ", which does not fit"
        console.print(
            f"The best candidate has {gain:+.0%} tokens/s compared with the recipe ({original.tokens_per_second_per_gpu:,.0f} per "
            f"GPU{does_not_fit})."
        )
    console.print(f"Its changes: {text_of(best.changes) or 'none'}.")


def counts_line(result: SearchResult) -> str:
    """Returns the number of candidates by outcome."""
    timed = result.candidates - result.invalid - result.too_large - result.slower
    return (
        f"{result.candidates:,} candidates: {result.invalid:,} are not valid, {result.too_large:,} do not fit, {result.slower:,} "
        f"only recompute more than one that fits; {timed:,} compared"
    )


def layout_text(plan: Plan) -> str:
    """Returns the dimensions of a layout by their abbreviations, and the pipeline schedule."""
    layout = plan.job.layout
    data = f"HSDP {layout.replicate}x{layout.shard}" if layout.shard > 1 else f"DDP {layout.replicate}"
    parts = [f"TP {layout.tensor}"] if layout.tensor > 1 else []
    parts += [f"CP {layout.context}"] if layout.context > 1 else []
    parts += [data] if layout.replicate > 1 else [f"FSDP {layout.shard}"] if layout.shard > 1 else []
    parts += [f"EP {layout.expert}"] if layout.expert > 1 else []
    parts += [f"PP {layout.pipeline} {layout.pipeline_schedule}"] if layout.pipeline > 1 else []
    return ", ".join(parts) or "one GPU"


def limit_text(plan: Plan) -> str:
    """Returns the largest part of the step and the largest overhead with their shares."""
    parts = sorted(plan.time.parts.items(), key=lambda part: -part[1])
    overheads = [part for part in parts[1:] if is_overhead(part[0])]
    return "; ".join(f"{name} {seconds / plan.time.seconds:.0%}" for name, seconds in [parts[0], *overheads[:1]])


def print_scaling(points: Sequence[Point], mode: Mode, hardware: Hardware, console: Console) -> None:
    """Prints plans on several numbers of GPUs, with a bar for each value."""
    model = next(point.plan.job.recipe.model for point in points if point.plan)
    console.print(f"{model.label()} on {hardware.name}, {MODES[mode]}")
    console.print()
    plans = [point.plan for point in points if point.plan]
    width = max(3, min(MAX_BAR, (console.width - WIDTH_OF_NUMBERS) // 3))
    has_price = any(plan.dollars is not None for plan in plans)
    heads = ["tokens/s/GPU", "", "hours", "", *(["dollars", ""] if has_price else []), "GiB", ""]
    found = table("Scaling", "GPUs", *heads)
    for column, head in enumerate(["GPUs", *heads]):
        if not head:
            found.columns[column].justify = "left"
    largest: list[Callable[[Plan], float]] = [
        lambda plan: plan.tokens_per_second_per_gpu,
        lambda plan: plan.hours,
        lambda plan: plan.dollars or 0.0,
    ]
    for point in points:
        if point.plan is None:
            continue
        cells = [f"{point.num_gpus:,}"]
        for value in largest[: 3 if has_price else 2]:
            highest = max(value(plan) for plan in plans)
            cells += [number(value(point.plan)), bar(value(point.plan) / highest if highest else 0.0, width, console)]
        cells += [f"{point.plan.reserved / GIB:,.1f}", "" if point.plan.fits else "too large"]
        found.add_row(*cells)
    if plans:
        console.print(found)
    for point in points:
        if point.plan is None:
            console.print(f"{point.num_gpus:,} GPUs: {point.problem}")


def bar(share: float, width: int, console: Console) -> str:
    """Draws a share of the largest value."""
    return ("█" if console.encoding.startswith("utf") else "#") * max(1, round(share * width))


def scaling_as_json(points: Sequence[Point], mode: Mode) -> dict[str, Any]:
    """Returns plans on several numbers of GPUs; those that do not divide have a `problem` only."""
    return {
        "scaling": mode,
        "points": [
            as_json(point.plan) if point.plan else {"num_gpus": point.num_gpus, "problem": point.problem}
            for point in points
        ],
    }


def search_as_json(result: SearchResult) -> dict[str, Any]:
    """Returns the best candidates of a search."""
    return {
        "candidates": result.candidates,
        "invalid": result.invalid,
        "too_large": result.too_large,
        "slower": result.slower,
        "best": [{"changes": dict(candidate.changes)} | as_json(candidate.plan) for candidate in result.best],
    }
