"""Advice for a run whose GPU is out of memory: by the plan, which keys would have saved most. Does not import torch."""

from collections.abc import Iterator
from itertools import chain

from titanlike.config import UserError
from titanlike.config.base import divisors
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks import check_recipe
from titanlike.tools.planning.changes import (
    Changes,
    apply,
    changes_rounding,
    checkpointing,
    microbatch_sizes,
    smaller_states,
    text_of,
)
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory
from titanlike.tools.planning.plan import GIB

NUM_CHANGES = 3
GPUS_PER_NODE = 8  # tensor-parallel ranks share a node


def advice(recipe: PretrainRecipe, num_ranks: int) -> str:
    """Returns what the plan expects of a run, and the changes that would have saved most."""
    found = savings(recipe, num_ranks)
    peak = f"the plan expects a peak of {_allocated(recipe, num_ranks) / GIB:,.2f} GiB"
    if not found:
        return f"{peak}; use more GPUs"
    lines = []
    for saved, changes in found:
        note = " and changes rounding" if changes_rounding(changes) else ""
        lines.append(f"{text_of(changes)} {'save' if len(changes) > 1 else 'saves'} {saved / GIB:,.2f} GiB{note}")
    return "\n".join([f"{peak} per GPU. What would have saved most:", *lines])


def savings(recipe: PretrainRecipe, num_ranks: int) -> list[tuple[int, Changes]]:
    """Returns the changes that save most bytes, each of other keys, the largest first."""
    before = _allocated(recipe, num_ranks)
    found: list[tuple[int, Changes]] = []
    for changes in _candidates(Job(recipe, num_ranks)):
        changed = apply(recipe, changes)
        try:
            check_recipe(changed, num_ranks)
            saved = before - _allocated(changed, num_ranks)
        except UserError:
            continue
        if saved > 0:
            found.append((saved, changes))
    best: list[tuple[int, Changes]] = []
    for saved, changes in sorted(found, key=lambda each: -each[0]):
        if len(best) < NUM_CHANGES and not any(set(changes) & set(others) for _, others in best):
            best.append((saved, changes))
    return best


def _candidates(job: Job) -> Iterator[Changes]:
    layout = job.layout
    inferred: Changes = {} if job.recipe.parallelism.shard == -1 else {"parallelism.shard": -1}
    smaller = (changes for changes in microbatch_sizes(job) if changes["training.local_batch_size"] < job.sequences)
    yield from chain(checkpointing(job), smaller, smaller_states(job))
    if job.recipe.compile.mode == "none":
        yield {"compile.mode": "block"}
    for degree in divisors(min(job.num_gpus, GPUS_PER_NODE)):
        if degree > layout.tensor:
            yield {"parallelism.tensor": degree, **inferred}
    if layout.replicate > 1:
        yield {"parallelism.replicate": 1, **inferred}
    if layout.reshard_after_forward != "always":
        yield {"parallelism.reshard_after_forward": "always"}
    if job.num_microbatches > 1 and layout.gradient_sync != "each_microbatch":
        yield {"parallelism.gradient_sync": "each_microbatch"}
    if job.recipe.training.reduce_dtype == "float32":
        yield {"training.reduce_dtype": "bfloat16"}


def _allocated(recipe: PretrainRecipe, num_ranks: int) -> int:
    job = Job(recipe, num_ranks)
    return max(memory(job, rank).allocated for rank in range(job.layout.pipeline))
