"""Search for the fastest layout of a recipe on a number of GPUs, which it can write as a recipe. Does not import torch.

Candidates are all combinations of layout, pipeline schedule, micro-batch size, activation checkpointing and float8. Those that
are not valid or do not fit in memory are dropped before their time is computed.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import divisors
from titanlike.config.layout import SCHEDULES
from titanlike.models.moe.config import MoeConfig
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.load import dump
from titanlike.tools.output_files import write_text
from titanlike.tools.planning.advice import Check, may_fit
from titanlike.tools.planning.changes import (
    CHECKPOINTING_MODES,
    Changes,
    apply,
    changes_rounding,
    expert_sizes,
    value_of,
)
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import Plan, available_memory, least_seconds, make_plan
from titanlike.tools.planning.ranges import range_of
from titanlike.tools.planning.step_time import step_time
from titanlike.tools.planning.traffic import traffic

MAX_CONTEXT = 64
MIN_CHUNK = 4096  # tokens of a sequence on a context-parallel rank: shorter chunks only add communication
NUM_BEST = 10
FIRST_LINE = "# Written by `titanlike plan --search`"

# With tensorwise scaling, gathering in float8 halves the traffic and costs nothing.
FLOAT8: tuple[Changes, ...] = (
    {"float8.scaling": "none", "float8.all_gather": False},
    {"float8.scaling": "tensorwise", "float8.all_gather": True},
)


@dataclass(frozen=True)
class Candidate:
    """A recipe of the search: the keys that differ from the original one, and its plan."""

    changes: Changes
    plan: Plan

    @property
    def slow_seconds(self) -> float:
        """Seconds of a step at the low end of the plan's range, which orders candidates: some kinds of layouts are less sure."""
        return self.plan.time.seconds / self.plan.range.low

    def is_level_with(self, best: "Candidate") -> bool:
        """Whether the ranges of both overlap, so that either may be the faster one."""
        high = self.plan.tokens_per_second * self.plan.range.high
        return high >= best.plan.tokens_per_second * best.plan.range.low


@dataclass
class SearchResult:
    """The fastest candidates, and the number of candidates by outcome."""

    best: list[Candidate]
    candidates: int = 0
    invalid: int = 0
    problem: str = ""  # of the first invalid candidate
    too_large: int = 0
    slower: int = 0  # than the same candidate with less recomputation, which fits


def search(
    recipe: PretrainRecipe,
    num_gpus: int,
    hardware: Hardware,
    check: Check,
    *,
    fixed: Collection[str] = (),
    measured: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """Returns the ten candidates with the highest throughput at the low end of their ranges, all of which fit.

    Args:
        recipe: The recipe, whose global batch size and other keys stay.
        num_gpus: Number of GPUs.
        hardware: What the recipe runs on.
        check: Raises `UserError` for a recipe that is not valid.
        fixed: Keys that keep the value of the recipe.
        measured: The hardware comes from `ranges.anchored`.
        on_progress: Called with the number of layouts that are done, and of all layouts.
    """
    result = SearchResult([])
    timed = estimates(recipe, num_gpus, hardware, check, fixed, measured, on_progress, result)
    # Fastest first. Once ten plans are faster than what the next candidate takes at least, no other can be among the best.
    for least, changes, job in timed:
        if len(result.best) == NUM_BEST and result.best[-1].slow_seconds <= least:
            break
        ranks = [traffic(job, rank) for rank in range(job.layout.pipeline)]
        seconds = step_time(job, hardware, ranks).seconds / range_of(job, hardware, measured).low
        if len(result.best) == NUM_BEST and result.best[-1].slow_seconds <= seconds:
            continue
        plan = make_plan(job, hardware, measured=measured)
        if plan.fits:  # on all pipeline ranks
            differing = {name: value for name, value in changes.items() if value != value_of(recipe, name)}
            result.best.append(Candidate(differing, plan))
            result.best = sorted(result.best, key=lambda candidate: candidate.slow_seconds)[:NUM_BEST]
    return result


def estimates(
    recipe: PretrainRecipe,
    num_gpus: int,
    hardware: Hardware,
    check: Check,
    fixed: Collection[str],
    measured: bool,
    on_progress: Callable[[int, int], None],
    result: SearchResult,
) -> list[tuple[float, Changes, Job]]:
    """Returns the candidates that may fit, each with the least time of a step at the low end of its range, fastest first. Counts
    the others in `result`."""
    timed: list[tuple[float, Changes, Job]] = []
    found = [layout for layout in layouts(recipe, num_gpus, hardware) if keeps(recipe, layout, fixed)]
    limit = available_memory(hardware)
    for done, layout in enumerate(found):
        for changes, job in _fitting(recipe, num_gpus, hardware, layout, limit, check, fixed, result):
            timed.append((least_seconds(job, hardware) / range_of(job, hardware, measured).low, changes, job))
        on_progress(done + 1, len(found))
    return sorted(timed, key=lambda entry: entry[0])


def _fitting(
    recipe: PretrainRecipe,
    num_gpus: int,
    hardware: Hardware,
    layout: Changes,
    limit: int,
    check: Check,
    fixed: Collection[str],
    result: SearchResult,
) -> Iterator[tuple[Changes, Job]]:
    """Yields the candidates of a layout that fit, and counts the others."""
    sizes = microbatch_sizes(recipe, num_gpus, layout)
    own = recipe.parallelism.pipeline_schedule
    schedules = (
        [name for name in SCHEDULES if name == own or name != "gpipe"] if layout["parallelism.pipeline"] > 1 else [own]
    )
    for schedule, precision in product(schedules, precisions(recipe, hardware)):
        modes = list(CHECKPOINTING_MODES)
        for size in sizes:
            base = {
                **layout,
                "parallelism.pipeline_schedule": schedule,
                **precision,
                "training.local_batch_size": size,
            }
            fits = False
            for mode in CHECKPOINTING_MODES:
                changes = base | {"activation_checkpoint.mode": mode}
                if not keeps(recipe, changes, fixed):
                    continue
                result.candidates += 1
                if mode not in modes:  # a smaller micro-batch does not fit
                    result.too_large += 1
                    continue
                if fits:
                    result.slower += 1
                    continue
                changed = apply(recipe, changes)
                try:
                    check(changed, num_gpus)
                except UserError as error:
                    result.invalid, result.problem = result.invalid + 1, result.problem or str(error)
                    continue
                job = Job(changed, num_gpus)
                if not may_fit(job, limit):
                    result.too_large += 1
                    modes.remove(mode)
                    continue
                fits = True
                yield changes, job


def microbatch_sizes(recipe: PretrainRecipe, num_gpus: int, layout: Changes) -> list[int]:
    """Returns the sizes that divide the sequences of a data-parallel rank."""
    num_data_ranks = num_gpus // math.prod(layout[f"parallelism.{name}"] for name in ("tensor", "pipeline", "context"))
    share, rest = divmod(recipe.training.global_batch_size, num_data_ranks)
    return [] if rest else divisors(share)


def precisions(recipe: PretrainRecipe, hardware: Hardware) -> list[Changes]:
    """Returns the settings of float8 that the hardware can compute, with the recipe's."""
    own = {name: value_of(recipe, name) for name in FLOAT8[0]}
    return [*FLOAT8, *([own] if own not in FLOAT8 else [])] if hardware.float8_tflops else [FLOAT8[0]]


def layouts(recipe: PretrainRecipe, num_gpus: int, hardware: Hardware) -> Iterator[Changes]:
    """Yields the sizes of all dimensions whose product is the number of GPUs: tensor parallelism within a node, and sizes of the
    recipe, which may have a reason."""
    parallelism = recipe.parallelism
    has_experts = isinstance(recipe.model, MoeConfig)
    pipelines = [size for size in divisors(num_gpus) if size <= recipe.model.num_layers]
    contexts = [
        size
        for size in divisors(num_gpus)
        if size in (1, parallelism.context) or (size <= MAX_CONTEXT and recipe.training.seq_len >= size * MIN_CHUNK)
    ]
    tensors = sorted({*divisors(hardware.gpus_per_node), parallelism.tensor})
    for tensor, pipeline, context in product(tensors, pipelines, contexts):
        data, rest = divmod(num_gpus, tensor * pipeline * context)
        if rest:
            continue
        changes: dict[str, Any] = {
            "parallelism.tensor": tensor,
            "parallelism.pipeline": pipeline,
            "parallelism.context": context,
        }
        if tensor == 1:
            changes["parallelism.async_tensor_parallel"] = False
        if pipeline != parallelism.pipeline:
            changes |= {"parallelism.pipeline_split": (), "parallelism.pipeline_stages": 0}
        for replicate in divisors(data):
            within_node = num_gpus // pipeline // replicate < hardware.gpus_per_node
            if within_node and replicate not in (1, parallelism.replicate):
                continue  # a smaller group of shards saves no traffic between nodes
            shard = -1 if parallelism.shard == -1 else data // replicate
            sizes = changes | {"parallelism.replicate": replicate, "parallelism.shard": shard}
            for expert in expert_sizes(recipe, data // replicate * context):
                yield sizes | {"parallelism.expert": expert} if has_experts else sizes


def keeps(recipe: PretrainRecipe, changes: Changes, fixed: Collection[str]) -> bool:
    """Whether changes leave the fixed keys as they are."""
    return all(name not in fixed or value == value_of(recipe, name) for name, value in changes.items())


def write_recipe(path: Path, original: Path, overrides: Mapping[str, str], best: Candidate) -> None:
    """Writes a recipe with the keys of a candidate and of the command line, that extends the original recipe.

    Args:
        path: The file to write. A file that was not written by a search is not replaced.
        original: The file of the original recipe.
        overrides: The keys of the command line.
        best: The candidate.
    """
    refuse_to_replace(path)
    planned = best.plan.job.recipe
    names = [name for name in overrides if "." in name] + [name for name in best.changes if name not in overrides]
    values: dict[str, Any] = {"extends": os.path.relpath(original, path.parent)}
    if program := overrides.get("program"):
        values["program"] = os.path.relpath(program, path.parent) if program.endswith(".py") else program
    for name in names:
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value_of(planned, name)
    rounding = "\n# float8 changes the rounding of the result." if changes_rounding(best.changes) else ""
    comment = (
        f"{FIRST_LINE} for {best.plan.job.num_gpus} x {best.plan.hardware.name}: "
        f"{best.plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU planned.{rounding}\n"
    )
    write_text(path, comment + dump(values), "--write")


def refuse_to_replace(path: Path) -> None:
    """Raises `UserError` if a file would be lost, or is not a recipe."""
    if path.suffix != ".toml":
        raise UserError(f"--write {path}: give the name of a .toml file")
    if path.exists() and not (path.is_file() and path.read_text(errors="replace").startswith(FIRST_LINE)):
        raise UserError(f"--write {path}: exists and was not written by --search; choose another name")
