"""Plans of one recipe on several numbers of GPUs. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from titanlike.config import UserError
from titanlike.recipe import PretrainRecipe
from titanlike.tools.planning.advice import Check
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import Plan, make_plan
from titanlike.tools.planning.program import TITANLIKE, Program

Mode = Literal["strong", "weak"]


@dataclass(frozen=True)
class Point:
    """A number of GPUs, and its plan or the reason why there is none."""

    num_gpus: int
    plan: Plan | None
    problem: str = ""


def scaling(
    recipe: PretrainRecipe,
    counts: Sequence[int],
    hardware: Hardware,
    check: Check,
    mode: Mode,
    program: Program = TITANLIKE,
    measured: bool = False,
) -> list[Point]:
    """Plans a recipe on several numbers of GPUs.

    Args:
        recipe: The recipe. Its data-parallel dimension, `shard`, follows the number of GPUs.
        counts: Numbers of GPUs, in ascending order.
        hardware: What the recipe runs on.
        check: Raises `UserError` for a recipe that is not valid.
        mode: "strong" keeps the global batch, and so the result of training. "weak" makes it proportional to the GPUs, from the
            recipe's on the first of `counts`, and trains on as many tokens in fewer steps.
        program: What trains it.
        measured: The hardware comes from `ranges.anchored`.
    """
    points = []
    for num_gpus in counts:
        try:
            scaled = scaled_recipe(recipe, counts, num_gpus, mode)
            check(scaled, num_gpus)
            points.append(Point(num_gpus, make_plan(Job(scaled, num_gpus, program), hardware, measured=measured)))
        except UserError as error:
            points.append(Point(num_gpus, None, str(error).partition("\n")[0]))
    return points


def scaled_recipe(recipe: PretrainRecipe, counts: Sequence[int], num_gpus: int, mode: Mode) -> PretrainRecipe:
    """Returns the recipe for one of several numbers of GPUs, which `scaling` describes."""
    free = replace(recipe, parallelism=replace(recipe.parallelism, shard=-1)) if len(counts) > 1 else recipe
    return free if mode == "strong" else weakly_scaled(free, counts[0], num_gpus)


def weakly_scaled(recipe: PretrainRecipe, first: int, num_gpus: int) -> PretrainRecipe:
    """Returns a recipe with a batch proportional to the number of GPUs and the same number of tokens, without a batch-size
    ramp."""
    training, schedule = recipe.training, recipe.schedule
    batch, rest = divmod(training.global_batch_size * num_gpus, first)
    if rest:
        raise UserError(
            f"training.global_batch_size = {training.global_batch_size} on {first} GPUs does not scale to {num_gpus} GPUs: "
            f"{training.global_batch_size} x {num_gpus} / {first} is not an integer; use a multiple of {first} GPUs"
        )

    def scaled(steps: int) -> int:
        return max(1, round(steps * first / num_gpus)) if steps else 0

    steps = scaled(training.steps)
    warmup = min(scaled(schedule.warmup_steps), steps)
    if schedule.decay_ratio:
        warmup = min(warmup, max(0, steps - schedule.num_decay_steps(steps)))  # both are rounded
    return replace(
        recipe,
        training=replace(training, global_batch_size=batch, batch_ramp=(), steps=steps),
        schedule=replace(schedule, warmup_steps=warmup),
    )
