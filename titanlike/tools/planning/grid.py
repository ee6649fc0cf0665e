"""The candidates of the page of `titanlike plan --html`: a recipe's plans over all that its controls set. Does not import torch."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from titanlike.config import UserError
from titanlike.recipe import PretrainRecipe
from titanlike.tools.planning.advice import Check
from titanlike.tools.planning.changes import CHECKPOINTING_MODES, Changes, apply, value_of
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import make_plan
from titanlike.tools.planning.program import TITANLIKE, Program
from titanlike.tools.planning.ranges import range_of
from titanlike.tools.planning.scaling import Mode, scaled_recipe
from titanlike.tools.planning.search import (
    Candidate,
    SearchResult,
    estimates,
    keeps,
    layouts,
    microbatch_sizes,
    precisions,
)
from titanlike.tools.planning.step_time import step_time
from titanlike.tools.planning.traffic import traffic

MAX_LAYOUTS = 8  # for all numbers of GPUs: a search can have hundreds
SIZE, SCHEDULE = "training.local_batch_size", "parallelism.pipeline_schedule"
SCALED = ("training.global_batch_size", "training.batch_ramp", "training.steps", "schedule.warmup_steps")


@dataclass(frozen=True)
class Grid:
    """What all candidates have in common.

    Args:
        recipe: The recipe.
        hardware: What it runs on.
        check: Raises `UserError` for a recipe that is not valid.
        fixed: Keys that keep the value of the recipe.
        program: What trains it.
        measured: The hardware comes from `ranges.anchored`.
    """

    recipe: PretrainRecipe
    hardware: Hardware
    check: Check
    fixed: Collection[str] = ()
    program: Program = TITANLIKE
    measured: bool = False

    def candidates(
        self,
        counts: Sequence[int],
        mode: Mode = "strong",
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Candidate]:
        """Returns valid plans by number of GPUs, sequence length, layout (fastest first), precision, micro-batch and checkpointing.

        Args:
            counts: Numbers of GPUs, in ascending order.
            mode: How the batch follows the number of GPUs.
            on_progress: Called with the number of layouts that are done, and of all layouts.
        """
        parts: list[tuple[PretrainRecipe, int, Changes, list[Changes]]] = []
        for num_gpus in counts:
            with suppress(UserError):  # the batch need not scale
                scaled = scaled_recipe(self.recipe, counts, num_gpus, mode)
                shown = self._layouts(scaled, num_gpus, max(3, MAX_LAYOUTS // len(counts)))
                parts += [(scaled, num_gpus, length, shown) for length in self._lengths(scaled)]
        found: list[Candidate] = []
        done, total = 0, sum(len(shown) for *_, shown in parts)
        for scaled, num_gpus, length, shown in parts:
            by_layout = []
            for layout in shown:
                by_layout.append([*self._plans(scaled, num_gpus, {**length, **layout})])
                done += 1
                on_progress(done, total)
            for plans in sorted(by_layout, key=_slow_seconds):
                found += plans
        return found

    def _layouts(self, recipe: PretrainRecipe, num_gpus: int, most: int) -> list[Changes]:
        """Returns the layouts with the fastest candidates that may fit, or others if they are few, and the recipe's."""
        fixed = [*self.fixed, SCHEDULE]
        search = recipe, num_gpus, self.hardware, self.check, fixed, self.measured, lambda *_: None, SearchResult([])
        found: dict[tuple[Any, ...], float] = {}  # seconds of a step
        for least, changes, job in estimates(*search):
            if sum(seconds <= least for seconds in found.values()) >= most:
                break
            layout = tuple(item for item in changes.items() if item[0].startswith("parallelism."))
            if layout not in found:
                ranks = [traffic(job, rank) for rank in range(job.layout.pipeline)]
                low = range_of(job, self.hardware, self.measured).low
                found[layout] = step_time(job, self.hardware, ranks).seconds / low
        fastest = [dict(layout) for layout in sorted(found, key=lambda layout: found[layout])]
        others = [
            {**layout, SCHEDULE: value_of(recipe, SCHEDULE)} for layout in layouts(recipe, num_gpus, self.hardware)
        ]
        chosen = [*fastest, *(layout for layout in others if layout not in fastest and keeps(recipe, layout, fixed))]
        return chosen[:most] + [layout for layout in chosen[most:] if keeps(recipe, layout, layout)]

    def _lengths(self, recipe: PretrainRecipe) -> Iterator[Changes]:
        """Yields half, the same and twice the sequence length, with the same number of tokens in a step."""
        training, max_seq_len = recipe.training, recipe.model.max_seq_len
        scaled = {name: value_of(recipe, name) for name in SCALED}  # differs from the original recipe with weak scaling
        is_fixed = {"training.seq_len", "training.global_batch_size"} & {*self.fixed} or training.batch_ramp
        for numerator, denominator in ((1, 1),) if is_fixed else ((1, 2), (1, 1), (2, 1)):
            seq_len, rest = divmod(training.seq_len * numerator, denominator)
            batch, rest_of_batch = divmod(training.global_batch_size * denominator, numerator)
            if not rest and not rest_of_batch:
                longer = {"model.max_seq_len": seq_len} if seq_len > max_seq_len else {}
                yield {**scaled, "training.seq_len": seq_len, "training.global_batch_size": batch, **longer}

    def _plans(self, scaled: PretrainRecipe, num_gpus: int, changes: Changes) -> Iterator[Candidate]:
        """Yields the plans of a layout. Micro-batches grow until nothing fits, but at least to the recipe's."""
        own = scaled.training.local_batch_size
        sizes = microbatch_sizes(apply(scaled, changes), num_gpus, changes)
        if SIZE in self.fixed:
            sizes = [own]
        elif sizes and sizes[-1] < own:
            sizes[-1] = own  # which a rank with fewer sequences reduces to theirs
        modes = dict.fromkeys([*CHECKPOINTING_MODES, scaled.activation_checkpoint.mode])
        for precision in precisions(scaled, self.hardware):
            for size in sizes:
                values = ({**changes, **precision, SIZE: size, "activation_checkpoint.mode": mode} for mode in modes)
                found = [plan for each in values if (plan := self._plan(scaled, num_gpus, each))]
                yield from found
                if size >= own and found and not any(candidate.plan.fits for candidate in found):
                    break

    def _plan(self, scaled: PretrainRecipe, num_gpus: int, values: Changes) -> Candidate | None:
        """Returns a candidate, or None if it is not valid."""
        if not keeps(scaled, values, self.fixed):
            return None
        try:
            changed = apply(self.recipe, values)
            self.check(changed, num_gpus)
            plan = make_plan(Job(changed, num_gpus, self.program), self.hardware, measured=self.measured)
        except UserError:
            return None
        return Candidate({name: value for name, value in values.items() if value != value_of(self.recipe, name)}, plan)


def _slow_seconds(plans: Sequence[Candidate]) -> float:
    """Returns the time of a step of the fastest candidate that fits, at the low end of its range."""
    return min((candidate.slow_seconds for candidate in plans if candidate.plan.fits), default=math.inf)
