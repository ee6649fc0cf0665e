"""What limits a job, and the change that helps most: each candidate is planned like the job itself. Does not import torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from titanlike.config import UserError
from titanlike.recipe import PretrainRecipe
from titanlike.tools.planning import changes as candidates
from titanlike.tools.planning.changes import Changes
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import memory
from titanlike.tools.planning.plan import GIB, Plan, least_seconds, make_plan

Check = Callable[[PretrainRecipe, int], None]
"""Raises `UserError` if a recipe cannot work on this number of GPUs: `titanlike.run.checks.check_recipe`."""

MIN_GAIN = 0.02  # a smaller one is below the error of the model
MAX_GPUS = 2**18
WORK = ("matmul", "attention", "elementwise", "optimizer")  # parts of a step that every layout has


@dataclass(frozen=True)
class Advice:
    """A recommendation in one sentence, and the plan that follows it."""

    text: str
    changes: Changes
    plan: Plan | None
    impossible: bool = False  # no number of GPUs can hold the model


def limits(plan: Plan) -> str:
    """Returns one sentence that names what limits the layout."""
    if not plan.fits:
        name, size = largest_category(plan)
        return (
            f"Memory limits this layout: {plan.reserved / GIB:,.1f} GiB of {plan.available / GIB:,.1f} GiB per GPU, of which "
            f"{name} are {size / GIB:,.1f} GiB."
        )
    parts = sorted(plan.time.parts.items(), key=lambda part: -part[1])
    shares = {name: seconds / plan.time.seconds for name, seconds in parts}
    (first, share), *others = shares.items()
    verb = "limit" if first.endswith("s") else "limits"
    text = f"{first[0].upper()}{first[1:]} {verb} this layout with {share:.0%} of the step"
    losses = [(name, share) for name, share in others if is_overhead(name)]
    if losses and losses[0][1] >= 0.01:
        text += f"; the next largest cost is {losses[0][0]} with {losses[0][1]:.0%}"
    return f"{text}."


def is_overhead(part: str) -> bool:
    """Whether a part of the step is time that another layout may avoid."""
    return part not in WORK


def largest_category(plan: Plan) -> tuple[str, int]:
    """Returns the category with most memory at the peak, and its bytes."""
    usage = plan.memory[plan.worst_rank].peak.usage
    values = {name: getattr(usage, name) for name in usage.__dataclass_fields__}
    name = max(values, key=lambda name: values[name])
    return {"gathered": "gathered weights", "loss": "buffers of the loss", "temporary": "temporary buffers"}.get(
        name, {"optimizer": "optimizer states"}.get(name, name)
    ), values[name]


def _valid_job(plan: Plan, changes: Changes, num_gpus: int, check: Check) -> Job | None:
    """Returns the job with changes, or None if they do not divide or contradict other keys."""
    recipe = candidates.apply(plan.job.recipe, changes)
    try:
        check(recipe, num_gpus)
    except UserError:
        return None
    return replace(plan.job, recipe=recipe, num_gpus=num_gpus)


def smallest_peak(job: Job) -> int:
    """Returns the reserved bytes of the first and last pipeline rank, one of which almost always needs most. Fast."""
    return max(memory(job, rank, every_block=False).reserved for rank in {0, job.layout.pipeline - 1})


def may_fit(job: Job, available: int) -> bool:
    """Whether the first and the last pipeline rank fit. Fast."""
    ranks = sorted({0, job.layout.pipeline - 1})
    jobs = [job] if (short := _shortened(job)) is job else [short, job]
    return all(memory(each, rank, every_block=False).reserved <= available for each in jobs for rank in ranks)


def _shortened(job: Job) -> Job:
    """Returns a job with at most two micro-batches per stage: it needs as much memory or less, and is faster to compute."""
    enough = 2 * len(job.split)
    if job.layout.pipeline == 1 or job.num_microbatches <= 2 * enough:
        return job
    batch = enough * job.sequences * job.num_data_ranks
    return replace(job, recipe=candidates.apply(job.recipe, {"training.global_batch_size": batch}))


def checkpointing_modes(plan: Plan, check: Check) -> dict[str, Plan | None]:
    """Returns the plan with each mode of activation checkpointing; None if a mode is not valid."""
    current = plan.job.recipe.activation_checkpoint.mode
    modes: dict[str, Plan | None] = {}
    for mode in dict.fromkeys([*candidates.CHECKPOINTING_MODES, current]):
        job = _valid_job(plan, {"activation_checkpoint.mode": mode}, plan.job.num_gpus, check)
        modes[mode] = plan if mode == current else make_plan(job, plan.hardware) if job else None
    return modes


def advice(plan: Plan, check: Check) -> Advice:
    """Returns the single change that helps most or, for a job that does not fit, the cheapest one that makes it fit."""
    return _faster(plan, check) if plan.fits else _fitting(plan, check)


def _faster(plan: Plan, check: Check) -> Advice:
    """Names the fastest change that keeps the rounding of the result, and then a faster one that does not."""
    group = list(candidates.single_changes(plan.job, plan.hardware))
    found: list[tuple[Changes, Plan]] = []
    for rounds in (False, True):
        fastest = _fastest(plan, [each for each in group if candidates.changes_rounding(each) == rounds], check)
        speed = found[0][1].tokens_per_second if found else plan.tokens_per_second
        if fastest and fastest[1].tokens_per_second >= speed * (1 + MIN_GAIN):
            found.append(fastest)
    if not found:
        return Advice(
            f"No single change makes it more than {MIN_GAIN:.0%} faster; --search compares all layouts.", {}, None
        )
    sentences: list[str] = []
    for changes, faster in found:
        text = "Or " + candidates.text_of(changes) if sentences else f"{_with_verb(changes, 'help')} most"
        sentences.append(
            f"{text}: {faster.tokens_per_second / plan.tokens_per_second - 1:+.0%} tokens/s "
            f"({faster.tokens_per_second_per_gpu:,.0f} per GPU) at {faster.reserved / GIB:,.1f} GiB{_note(changes)}."
        )
    return Advice(" ".join(sentences), *found[0])


def _fitting(plan: Plan, check: Check) -> Advice:
    excess = f"It does not fit by {(plan.reserved - plan.available) / GIB:,.1f} GiB per GPU"
    num_gpus = plan.job.num_gpus
    for group in (
        candidates.single_changes(plan.job, plan.hardware),
        *candidates.combinations(plan.job, plan.hardware),
    ):
        if cheapest := _cheapest_that_fits(plan, group, check):
            changes, found = cheapest
            return Advice(
                f"{excess}; {_with_verb(changes, 'make')} it fit at the lowest cost: {found.reserved / GIB:,.1f} GiB and "
                f"{found.tokens_per_second_per_gpu:,.0f} tokens/s per GPU{_note(changes)}.",
                changes,
                found,
            )
    least = plan.reserved
    more = num_gpus
    while (more := 2 * more) <= MAX_GPUS:
        for group in candidates.combinations(plan.job, plan.hardware):
            jobs = [(changes, job) for changes in group if (job := _valid_job(plan, changes, more, check))]
            least = min([least, *(smallest_peak(job) for _, job in jobs)])
            fitting = [changes for changes, job in jobs if may_fit(job, plan.available)]
            if cheapest := _cheapest_that_fits(plan, fitting, check, more):
                changes, found = cheapest
                return Advice(
                    f"{excess}, and nothing makes it fit on {num_gpus:,} GPUs; it fits on {more:,} GPUs with "
                    f"{candidates.text_of(changes) or 'the same recipe'}, at {found.reserved / GIB:,.1f} GiB{_note(changes)}.",
                    changes,
                    found,
                )
    return Advice(
        f"No number of {plan.hardware.name} GPUs can hold this model: whatever the layout, checkpointing and optimizer states, a "
        f"GPU needs at least {least / GIB:,.0f} GiB of {plan.available / GIB:,.1f} GiB.",
        {},
        None,
        impossible=True,
    )


def _cheapest_that_fits(
    plan: Plan, group: Iterable[Changes], check: Check, num_gpus: int = 0
) -> tuple[Changes, Plan] | None:
    """Returns the changes with the highest throughput among those that fit, and prefers those that keep the rounding."""
    group = list(group)
    exact = [changes for changes in group if not candidates.changes_rounding(changes)]
    return _fastest(plan, exact, check, num_gpus) or _fastest(plan, group, check, num_gpus)


def _fastest(plan: Plan, group: Iterable[Changes], check: Check, num_gpus: int = 0) -> tuple[Changes, Plan] | None:
    """Returns the changes with the highest throughput among those that are valid and fit."""
    fitting = []
    for changes in group:
        job = _valid_job(plan, changes, num_gpus or plan.job.num_gpus, check)
        if job and may_fit(job, plan.available):
            step = least_seconds(job, plan.hardware) / job.recipe.training.tokens_per_step
            fitting.append((step, changes, job))
    best: tuple[Changes, Plan] | None = None
    for least, changes, job in sorted(fitting, key=lambda entry: entry[0]):
        if best and 1 / best[1].tokens_per_second <= least:  # no other can be faster
            break
        found = make_plan(job, plan.hardware)
        if found.fits and (best is None or found.tokens_per_second > best[1].tokens_per_second):
            best = changes, found
    return best


def _note(changes: Changes) -> str:
    return "; the rounding of the result changes" if candidates.changes_rounding(changes) else ""


def _with_verb(changes: Changes, verb: str) -> str:
    return f"{candidates.text_of(changes)} {verb if len(changes) > 1 else f'{verb}s'}"
