"""Plans, searches and scaling as terminal tables and as JSON. Does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from titanlike.models.moe.config import MoeConfig
from titanlike.recipe import PretrainRecipe
from titanlike.tools.planning.advice import Advice, is_overhead, limits
from titanlike.tools.planning.changes import text_of
from titanlike.tools.planning.collectives import Links
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.memory import Usage
from titanlike.tools.planning.plan import GIB, Plan, deciding_ranks
from titanlike.tools.planning.ranges import DENSE_ERRORS, FEWEST, MIXTURE_ERRORS, MIXTURES, range_name
from titanlike.tools.planning.scaling import Mode, Point
from titanlike.tools.planning.search import SearchResult

NEVER_WRAPPED = ("GPUs", "tokens/s/GPU", "tok/s/GPU", "at least", "hours", "dollars", "GiB", "recompute", "batch", "")
MIN_SHARE = 5e-4  # shorter parts of a step are left out

CATEGORIES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered weights",
    "activations": "activations",
    "loss": "loss buffers",
    "temporary": "temporary buffers",
    "workspaces": "workspaces of cuBLAS",
}

MAX_BAR = 24
WIDTH_OF_NUMBERS = 64  # of a line with all columns, without the bars

MODES = {
    "strong": "strong scaling: the global batch of the recipe on any number of GPUs; --scaling weak makes it proportional to them",
    "weak": "weak scaling: the global batch is proportional to the number of GPUs; --scaling strong keeps the recipe's",
}


def print_plan(plan: Plan, recommendation: Advice, modes: Mapping[str, Plan | None], console: Console) -> None:
    """Prints the report of a plan.

    Args:
        plan: The plan.
        recommendation: What would help most.
        modes: The plan with each mode of activation checkpointing; None if the mode is not valid.
        console: Where to print.
    """
    for line in summary_lines(plan):
        console.print(line)
    console.print()
    console.print(_memory_table(plan))
    console.print(memory_line(plan))
    console.print()
    console.print(_modes_table(plan, modes))
    console.print()
    console.print(_traffic_table(plan))
    console.print()
    console.print(_time_table(plan))
    console.print()
    for line in result_lines(plan):
        console.print(line)
    console.print()
    console.print(limits(plan))
    console.print(recommendation.text)


def table(title: str, *columns: str) -> Table:
    """Returns an empty table without borders: the first column is text, the others are numbers."""
    result = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        result.add_column(column, justify="right" if index else "left", no_wrap=column in NEVER_WRAPPED)
    return result


def summary_lines(plan: Plan) -> list[str]:
    """Returns model, hardware, layout and batch."""
    job, hardware = plan.job, plan.hardware
    recipe, layout = job.recipe, job.layout
    dimensions = [f"{name} {size}" for name, size in layout.dimensions().items() if size > 1]
    if layout.pipeline > 1:
        dimensions[0] += f" ({layout.pipeline_schedule}, {len(job.split) // layout.pipeline} per rank)"
    if layout.expert > 1:
        dimensions.append(f"expert {layout.expert} of shard x context")
    active = ""
    if isinstance(recipe.model, MoeConfig):
        active = f", {recipe.model.num_active_parameters() / 1e9:,.3g} billion per token"
    nodes = -(-job.num_gpus // hardware.gpus_per_node)
    return [
        f"model     {recipe.model.label()}: {recipe.model.num_parameters() / 1e9:,.3g} billion parameters{active}",
        f"hardware  {job.num_gpus:,} x {hardware.name}: {nodes:,} node{'s' if nodes > 1 else ''}, "
        f"{hardware.memory_gib:g} GiB per GPU",
        f"layout    {', '.join(dimensions) or 'one process'}",
        f"batch     {recipe.training.global_batch_size:,} sequences x {recipe.training.seq_len:,} tokens; per rank "
        f"{job.num_microbatches} x {job.sequences}",
        f"compute   {precision_text(recipe)}, compile {recipe.compile.mode}, checkpointing {recipe.activation_checkpoint.mode}"
        + (", activations offloaded" if recipe.activation_checkpoint.offload else ""),
    ]


def precision_text(recipe: PretrainRecipe) -> str:
    """Returns the dtype of the computation, and whether matmuls are in float8."""
    float8 = recipe.float8
    added = f" and float8 {float8.scaling}{' with all-gather' if float8.all_gather else ''}"
    return recipe.training.compute_dtype + (added if float8.scaling != "none" else "")


def _memory_table(plan: Plan) -> Table:
    ranks = deciding_ranks(plan)
    heads = ["per GPU"] if len(plan.memory) == 1 else [f"pipeline rank {rank}" for rank in ranks]
    result = table("Memory at the peak, GiB", "", *heads)
    for name, label in CATEGORIES.items():
        values = [getattr(plan.memory[rank].peak.usage, name) for rank in ranks]
        if any(values):
            result.add_row(label, *(gib(value) for value in values))
    result.add_row("peak, allocated", *(gib(plan.memory[rank].allocated) for rank in ranks), style="bold")
    result.add_row("peak, reserved", *(gib(plan.memory[rank].reserved) for rank in ranks), style="bold")
    return result


def memory_line(plan: Plan) -> str:
    """Returns when the peak occurs, and whether the job fits."""
    peak = plan.memory[plan.worst_rank].peak.label
    difference = (plan.available - plan.reserved) / GIB
    verdict = f"{difference:,.1f} GiB remain" if plan.fits else f"{-difference:,.1f} GiB are missing: it does not fit"
    return (
        f"The peak is in: {peak}. Of {plan.available / GIB:,.1f} GiB that the caching allocator can reserve, {verdict}."
    )


def _modes_table(plan: Plan, modes: Mapping[str, Plan | None]) -> Table:
    result = table(
        "Activation checkpointing, from formulas", "mode", "allocated, GiB", "reserved, GiB", "", "tokens/s/GPU"
    )
    for mode, found in modes.items():
        is_current = mode == plan.job.recipe.activation_checkpoint.mode
        label = f"{mode} (recipe)" if is_current else mode
        if found is None:
            result.add_row(label, "not valid", "", "", "")
            continue
        speed = f"{found.tokens_per_second_per_gpu:,.0f}"
        fits = "fits" if found.fits else "does not fit"
        result.add_row(
            label, gib(found.allocated), gib(found.reserved), fits, speed, style="bold" if is_current else ""
        )
    return result


def _traffic_table(plan: Plan) -> Table:
    rank = plan.worst_rank
    suffix = f", pipeline rank {rank}" if len(plan.memory) > 1 else ""
    result = table(f"Communication of a GPU in a step{suffix}", "axis", "collective", "", "calls", "GiB", "links")
    for column in (1, 2):
        result.columns[column].justify = "left"
    links = Links(plan.job, plan.hardware)
    for item in plan.traffic[rank]:
        span = "nodes" if links.spans_nodes(item) else "one node"
        result.add_row(item.axis, item.kind, item.purpose, f"{item.calls:,}", gib(item.bytes), span)
    if not plan.traffic[rank]:
        result.add_row("none")
    return result


def _time_table(plan: Plan) -> Table:
    scale, unit, digits = (1, "seconds", 3) if plan.time.seconds >= 1 else (1e3, "milliseconds", 2)
    result = table("Time of a step", "", unit, "share")
    for name, seconds in sorted(plan.time.parts.items(), key=lambda part: -part[1]):
        if seconds >= MIN_SHARE * plan.time.seconds:
            result.add_row(name, f"{seconds * scale:,.{digits}f}", f"{seconds / plan.time.seconds:.1%}")
    result.add_row("step", f"{plan.time.seconds * scale:,.{digits}f}", "", style="bold")
    for axis, seconds in plan.time.hidden.items():
        if seconds >= MIN_SHARE * plan.time.seconds:
            result.add_row(f"hidden behind computation: {axis}", f"{seconds * scale:,.{digits}f}", "", style="dim")
    return result


def result_lines(plan: Plan) -> list[str]:
    """Returns throughput, and the duration and cost of the run."""
    training = plan.job.recipe.training
    tokens = training.num_tokens(training.steps)
    return [
        f"speed     {plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, {plan.tokens_per_second:,.0f} in total, "
        f"MFU {plan.mfu:.1%}",
        f"range     {range_text(plan)}",
        *([] if plan.measured else [f"errors    {errors_text(plan.kind)}"]),
        f"run       {training.steps:,} steps, {tokens:.3g} tokens: {cost_text(plan)}",
    ]


def range_text(plan: Plan) -> str:
    """Returns between which speeds, and which costs, the run is likely to be, and from what that follows."""
    low, high = (plan.tokens_per_second_per_gpu * factor for factor in (plan.range.low, plan.range.high))
    hours = f"{number(plan.hours / plan.range.high)} to {number(plan.hours / plan.range.low)} hours"
    dollars = ""
    if plan.dollars is not None:
        dollars = f", ${number(plan.dollars / plan.range.high)} to ${number(plan.dollars / plan.range.low)}"
    return f"{low:,.0f} to {high:,.0f} tokens/s per GPU, {hours}{dollars}: {range_source(plan)}"


def range_source(plan: Plan) -> str:
    """Returns from which published runs the range follows."""
    if plan.measured:
        return f"{plan.range.covered} ratios of published runs"
    name = range_name(plan.kind)
    few = "" if name == plan.kind else f"; fewer than {FEWEST} are of this class ({plan.kind})"
    source = f"{plan.range.covered} published runs, held out: {name}{few}"
    if plan.hardware.efficiency == Hardware.efficiency:
        source += f"; none of them on {plan.hardware.name}, whose efficiency is not measured"
    return source


def errors_text(kind: str) -> str:
    """Returns the median error of plans of published runs, of mixtures or of dense models."""
    errors, models = (MIXTURE_ERRORS, kind) if kind == MIXTURES else (DENSE_ERRORS, "dense models")
    return (
        f"the speed of {errors.runs} published runs of {models} has a median error of {errors.held_out:.1%}, held out; it had "
        f"{errors.first:.1%} when {errors.first_runs} of them were first compared, before constants were fitted"
    )


def cost_text(plan: Plan) -> str:
    """Returns duration, price and energy of the run, as far as they are known."""
    parts = [f"{plan.hours:,.1f} hours" if plan.hours >= 1 else f"{plan.hours * 60:,.1f} minutes"]
    if plan.dollars is not None:
        parts.append(f"${plan.dollars:,.0f}" if plan.dollars >= 10 else f"${plan.dollars:.2f}")
    if plan.kwh is not None:
        parts.append(f"{number(plan.kwh)} kWh")
    return ", ".join(parts)


def brief(plan: Plan) -> str:
    """Returns memory, speed and cost in one line, for programs that print a plan beside other things."""
    verdict = "" if plan.fits else " (does not fit)"
    low, high = (plan.tokens_per_second_per_gpu * factor for factor in (plan.range.low, plan.range.high))
    return (
        f"{plan.reserved / GIB:,.1f} of {plan.available / GIB:,.1f} GiB per GPU{verdict}, "
        f"{plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f}), {cost_text(plan)}"
    )


def number(value: float) -> str:
    """Formats a positive number with three significant digits, without an exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 4
    return f"{value:,.{digits}f}"


def gib(size: float) -> str:
    """Formats bytes as GiB."""
    return f"{size / GIB:,.2f}"


def as_json(
    plan: Plan, recommendation: Advice | None = None, modes: Mapping[str, Plan | None] | None = None
) -> dict[str, Any]:
    """Returns a plan with SI base units, which the names of the keys have."""
    job, layout = plan.job, plan.job.layout
    is_mixture = isinstance(job.recipe.model, MoeConfig)
    result: dict[str, Any] = {
        "num_gpus": job.num_gpus,
        "hardware": plan.hardware.name,
        "model": job.recipe.model.label(),
        "num_parameters": job.recipe.model.num_parameters(),
        "layout": layout.dimensions()
        | ({"expert": layout.expert} if is_mixture else {})
        | {"pipeline_schedule": layout.pipeline_schedule},
        "activation_checkpoint": job.recipe.activation_checkpoint.mode,
        "activation_offload": job.recipe.activation_checkpoint.offload,
        "num_microbatches": job.num_microbatches,
        "microbatch_sequences": job.sequences,
        "fits": plan.fits,
        "available_bytes": plan.available,
        "peak_allocated_bytes": plan.allocated,
        "peak_reserved_bytes": plan.reserved,
        "flops_per_token": plan.flops_per_token,
        "flops_per_step": plan.flops_per_step,
        "step_seconds": plan.time.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
        "class": plan.kind,
        "range_runs": plan.range.runs,
        "range_source": "ratios" if plan.measured else range_name(plan.kind),
        "tokens_per_second_per_gpu_range": [
            plan.tokens_per_second_per_gpu * factor for factor in (plan.range.low, plan.range.high)
        ],
        "mfu": plan.mfu,
        "run_seconds": plan.hours * 3600,
        "run_dollars": plan.dollars,
        "run_joules": None if plan.kwh is None else plan.kwh * 3.6e6,
        "step_parts_seconds": plan.time.parts,
        "hidden_communication_seconds": plan.time.hidden,
        "pipeline_ranks": [_rank_as_json(plan, rank) for rank in range(len(plan.memory))],
        "limits": limits(plan),
    }
    if recommendation:
        result["advice"] = recommendation.text
        result["advice_changes"] = dict(recommendation.changes)
    if modes:
        result["activation_checkpoint_modes"] = {
            mode: found
            and {
                "peak_allocated_bytes": found.allocated,
                "peak_reserved_bytes": found.reserved,
                "fits": found.fits,
                "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
            }
            for mode, found in modes.items()
        }
    return result


def _rank_as_json(plan: Plan, rank: int) -> dict[str, Any]:
    memory, links = plan.memory[rank], Links(plan.job, plan.hardware)
    return {
        "rank": rank,
        "peak_allocated_bytes": memory.allocated,
        "peak_reserved_bytes": memory.reserved,
        "peak_label": memory.peak.label,
        "peak_bytes": usage_as_json(memory.peak.usage),
        "moments": [{"label": moment.label, "bytes": usage_as_json(moment.usage)} for moment in memory.moments],
        "collectives": [
            {
                "axis": item.axis,
                "kind": item.kind,
                "purpose": item.purpose,
                "calls": item.calls,
                "bytes": item.bytes,
                "crosses_nodes": links.spans_nodes(item),
            }
            for item in plan.traffic[rank]
        ],
    }


def usage_as_json(usage: Usage) -> dict[str, int]:
    """Returns the bytes of each category."""
    return {field.name: getattr(usage, field.name) for field in fields(usage)}


def print_search(result: SearchResult, original: Plan | None, console: Console) -> None:
    """Prints the best candidates of a search."""
    console.print(counts_line(result))
    if not result.best:
        return
    found = table("Best candidates", "#", "layout", "recompute", "float8", "batch", "GiB", "tok/s/GPU", "at least", "")
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
            f"{plan.tokens_per_second_per_gpu * plan.range.low:,.0f}",
            "level" if place > 1 and candidate.is_level_with(result.best[0]) else "",
        )
    console.print()
    console.print(found)
    console.print(
        "In the order of what they have at least: the low end of the range. Level: ranges overlap, so either may be faster."
    )
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


def print_stages(plans: Mapping[str, Plan], console: Console) -> None:
    """Prints the plans of recipes that are trained one after the other, and their sum."""
    first, *_ = plans.values()
    console.print(f"{first.job.recipe.model.label()} on {first.job.num_gpus:,} x {first.hardware.name}")
    console.print()
    has_price = first.dollars is not None
    heads = ("tokens", "length", "GiB", "tokens/s/GPU", "hours", *(["dollars"] if has_price else []), "")
    found = table("Stages", "recipe", *heads)
    for path, plan in plans.items():
        training = plan.job.recipe.training
        numbers = [f"{training.num_tokens(training.steps):.3g}", f"{training.seq_len:,}", f"{plan.reserved / GIB:,.1f}"]
        numbers += [f"{plan.tokens_per_second_per_gpu:,.0f}", number(plan.hours)]
        numbers += [number(plan.dollars)] if plan.dollars is not None else []
        found.add_row(Path(path).stem, *numbers, "" if plan.fits else "too large")
    total = stages_as_json(plans)
    hours, *ends = (number(seconds / 3600) for seconds in (total["run_seconds"], *total["run_seconds_range"]))
    prices = [number(each) for each in (total["run_dollars"], *total["run_dollars_range"])] if has_price else []
    found.add_row("all", f"{total['num_tokens']:.3g}", "", "", "", hours, *prices[:1], style="bold")
    console.print(found)
    console.print(f"range     {' to '.join(ends)} hours" + (f", ${' to $'.join(prices[1:])}" if has_price else ""))


def stages_as_json(plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Returns the plans of recipes that are trained one after the other, and their sum."""
    values = list(plans.values())
    price = (values[0].hardware.dollars_per_gpu_hour or 0.0) * values[0].job.num_gpus
    hours = [sum(plan.hours for plan in values)]
    hours += [sum(plan.hours / getattr(plan.range, end) for plan in values) for end in ("high", "low")]
    dollars = [price * each for each in hours] if price else [None] * 3
    return {
        "stages": [{"recipe": path} | as_json(plan) for path, plan in plans.items()],
        "num_tokens": sum(plan.job.recipe.training.num_tokens(plan.job.recipe.training.steps) for plan in values),
        "run_seconds": 3600 * hours[0],
        "run_seconds_range": [3600 * each for each in hours[1:]],
        "run_dollars": dollars[0],
        "run_dollars_range": dollars[1:],
    }


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
