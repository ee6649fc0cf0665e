"""How often FSDP all-gathers weights in a step. Imports torch only for the order of schedules with many stages per rank."""

from collections.abc import Iterator, Mapping, Sequence

from titanlike.tools.planning.job import Job
from titanlike.tools.planning.parameters import Unit
from titanlike.tools.planning.schedules import Action, actions

ACTIVE_STAGES = 3  # of a rank, which torch's schedules with several stages per rank keep gathered


def num_gathers(job: Job, rank: int, stages: Mapping[int, Sequence[Unit]]) -> dict[int, list[int]]:
    """Returns how often a pipeline rank gathers each FSDP unit of its stages."""
    resharded = any(unit.reshards for units in stages.values() for unit in units)
    if job.layout.pipeline == 1:
        return {
            stage: [job.num_microbatches * (1 + (unit.reshards and unit.in_backward)) for unit in units]
            for stage, units in stages.items()
        }
    if not resharded and len(stages) <= ACTIVE_STAGES:  # kept for all micro-batches
        return {stage: [1] * len(units) for stage, units in stages.items()}
    counts = {stage: [0] * len(units) for stage, units in stages.items()}
    gathered = {stage: [False] * len(units) for stage, units in stages.items()}
    active: set[int] = set()
    order = actions(job)[rank]
    for action, next_stages in zip(order, _next_stages(order), strict=True):
        fetched: set[int] = set()
        if job.schedule.stages_per_rank > 1:  # the schedule gathers and frees whole stages
            fetched = next_stages - active
            for stage in active - next_stages:
                gathered[stage] = [False] * len(stages[stage])
            active = next_stages
        reads_weights = {action.stage} if action.kind != "backward_weight" else set()
        for stage in fetched | reads_weights:
            backward = stage not in fetched and action.kind != "forward"
            for index, unit in enumerate(stages[stage]):
                if not gathered[stage][index] and (unit.in_backward or not backward):
                    gathered[stage][index] = True
                    counts[stage][index] += 1
        if action.kind == "forward":
            gathered[action.stage] = [not unit.reshards for unit in stages[action.stage]]
    return counts


def _next_stages(order: Sequence[Action]) -> Iterator[set[int]]:
    """Yields the stages that a rank computes next, from each action on: the first few different ones."""
    recent: list[int] = []
    found = []
    for action in reversed(order):
        recent = [action.stage, *(stage for stage in recent if stage != action.stage)][:ACTIVE_STAGES]
        found.append(set(recent))
    yield from reversed(found)
