"""The plans of a grid as one HTML page, which draws memory over a step, and memory against speed. Does not import torch."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from titanlike.tools.html_page import html_page
from titanlike.tools.planning.changes import Changes
from titanlike.tools.planning.memory import Moment, Usage
from titanlike.tools.planning.report import CATEGORIES, layout_text, limit_text, precision_text, range_source
from titanlike.tools.planning.search import Candidate

MIB = 2**20
MAX_MOMENTS = 96  # of a step: a pipeline has thousands


def page(candidates: Sequence[Candidate], command: Sequence[str]) -> str:
    """Returns the page. It shows the candidate with the fewest changes first.

    Args:
        candidates: Of one model and one kind of hardware.
        command: The words that plan the recipe, to which the page adds the number of GPUs and the changes of a candidate.
    """
    first = candidates[0].plan
    tables: dict[str, dict[Any, int]] = {"moments": {}, "sources": {}}  # what many candidates have, with its index
    rows = [_row(candidate, tables) for candidate in candidates]
    data = {
        "candidates": rows,
        "initial": min(range(len(rows)), key=lambda index: len(candidates[index].changes)),
        "available": first.available,
        "categories": CATEGORIES,
        "command": shlex.join(command),
        **{name: list(table) for name, table in tables.items()},
    }
    counts = {candidate.plan.job.num_gpus for candidate in candidates}
    number = f"{first.job.num_gpus:,} x " if len(counts) == 1 else ""
    title = f"Plan of {first.job.recipe.model.label()} on {number}{first.hardware.name}"
    return html_page(Path(__file__).parent, {"title": escape(title)}, data)


def _row(candidate: Candidate, tables: dict[str, dict[Any, int]]) -> dict[str, Any]:
    """Returns what the page shows of a candidate."""
    plan = candidate.plan
    moments = _condensed(plan.memory[plan.worst_rank].moments)
    labels = tuple(moment.label for moment in moments)
    usage = {
        field.name: [round(getattr(moment.usage, field.name) / MIB) for moment in moments] for field in fields(Usage)
    }
    return {
        "gpus": plan.job.num_gpus,
        "seq_len": plan.job.recipe.training.seq_len,
        "layout": layout_text(plan),
        "precision": precision_text(plan.job.recipe),
        "batch": plan.job.sequences,
        "mode": plan.job.recipe.activation_checkpoint.mode,
        "microbatches": plan.job.num_microbatches,
        "fits": plan.fits,
        "allocated": plan.allocated,
        "reserved": plan.reserved,
        "rank": plan.worst_rank if len(plan.memory) > 1 else None,
        "speed": plan.tokens_per_second_per_gpu,
        "range": [plan.range.low, plan.range.high],
        "source": _index(tables["sources"], range_source(plan)),
        "mfu": plan.mfu,
        "hours": plan.hours,
        "dollars": plan.dollars,
        "limit": limit_text(plan),
        "moments": _index(tables["moments"], labels),
        # One number for all moments, where it is the same.
        "usage": {name: values[0] if len({*values}) == 1 else values for name, values in usage.items() if any(values)},
        "flags": _flags(candidate.changes),
    }


def _condensed(moments: Sequence[Moment]) -> list[Moment]:
    """Returns at most `MAX_MOMENTS` moments: of neighbors, the largest."""
    width = -(-len(moments) // MAX_MOMENTS)
    groups = (moments[start : start + width] for start in range(0, len(moments), width))
    return [max(group, key=lambda moment: moment.usage.total) for group in groups]


def _index(table: dict[Any, int], value: Any) -> int:
    return table.setdefault(value, len(table))


def _flags(changes: Changes) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in changes.items()}
    return shlex.join(f"--{name}={text}" for name, text in texts.items())
