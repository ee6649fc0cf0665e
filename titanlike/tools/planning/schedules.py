"""The order in which pipeline ranks compute, from torch's own schedules, and the time that it takes.

torch is imported only for schedules with several stages per rank, which it builds without processes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from titanlike.config import UserError
from titanlike.config.layout import SCHEDULES
from titanlike.tools.planning.job import Job

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class Action(NamedTuple):
    """One computation of a pipeline rank: a forward or backward pass of a micro-batch through a stage."""

    stage: int
    kind: Kind
    microbatch: int


Order = Sequence[Sequence[Action]]  # of each pipeline rank


class Times(NamedTuple):
    """The simulated times of a step, in seconds."""

    seconds: float  # until the last rank has finished
    idle: tuple[float, ...]  # of each rank: waits for other ranks, before, between and after its computations


def actions(job: Job) -> Order:
    """Returns what each pipeline rank computes in a step, in order. Raises `UserError` if the schedule does not support it."""
    return order(job.layout.pipeline_schedule, job.layout.pipeline, len(job.split), job.num_microbatches)


@cache
def order(schedule: str, num_ranks: int, num_stages: int, num_microbatches: int) -> Order:
    """Returns what each rank computes with one of `config.layout.SCHEDULES`."""
    if num_ranks == 1:
        return ((*_alternate(0, 0, num_microbatches),),)
    if schedule == "gpipe":
        kinds: tuple[Kind, ...] = ("forward", "backward")
        return tuple(
            tuple(Action(rank, kind, i) for kind in kinds for i in range(num_microbatches)) for rank in range(num_ranks)
        )
    if schedule == "1f1b":
        if num_microbatches < num_ranks:
            raise UserError(
                f"parallelism.pipeline_schedule = '1f1b' over {num_ranks} ranks takes {num_ranks} micro-batches or more, not "
                f"{num_microbatches}; use a smaller training.local_batch_size, or the schedule 'gpipe'"
            )
        # Rank r starts with as many forward passes as there are ranks after it.
        return tuple(tuple(_alternate(rank, num_ranks - 1 - rank, num_microbatches)) for rank in range(num_ranks))
    from titanlike.tools.planning.torch_internals import pipeline_order  # imports torch

    try:
        orders = pipeline_order(SCHEDULES[schedule].torch_class, num_ranks, num_stages, num_microbatches)
    except ValueError as error:
        raise UserError(f"parallelism.pipeline_schedule = {schedule!r}: {error}") from None
    return tuple(
        tuple(Action(stage, KINDS[kind], microbatch) for stage, kind, microbatch in rank_actions)
        for rank_actions in orders
    )


def _alternate(stage: int, num_warmup: int, num_microbatches: int) -> list[Action]:
    """Returns some forward passes, then one forward and one backward pass in turn, then the remaining backward passes."""
    found = [Action(stage, "forward", i) for i in range(min(num_warmup, num_microbatches))]
    for i in range(num_microbatches):
        if i + num_warmup < num_microbatches:
            found.append(Action(stage, "forward", i + num_warmup))
        found.append(Action(stage, "backward", i))
    return found


def simulate_time(
    orders: Order,
    durations: Mapping[tuple[int, Kind], float] | Callable[[Action], float],
    p2p: Callable[[int, int], float] = lambda sender, receiver: 0.0,
) -> Times:
    """Returns how long a step takes if each rank computes in its order and waits for the inputs of each computation.

    Args:
        durations: seconds of each action, by stage and kind or by action.
        p2p: seconds from the end of a computation of a rank until its output has arrived at another rank. Sends do not delay the
            sender.
    """
    duration = durations if callable(durations) else lambda action: durations[action.stage, action.kind]
    rank_of = {action.stage: rank for rank, rank_actions in enumerate(orders) for action in rank_actions}
    last_stage = max(rank_of)
    ready: dict[Action, float] = {}  # when each finished action's output exists
    clocks, busy, position = ([0.0] * len(orders), [0.0] * len(orders), [0] * len(orders))

    def inputs(action: Action) -> list[Action]:
        stage, kind, microbatch = action
        if kind == "forward":
            return [Action(stage - 1, "forward", microbatch)] if stage else []
        if kind == "backward_weight":
            return [Action(stage, "backward_input", microbatch)]
        return [
            Action(stage, "forward", microbatch) if stage == last_stage else Action(stage + 1, "backward", microbatch)
        ]

    waiting = set(range(len(orders)))
    while waiting:
        progress = False
        for rank in sorted(waiting):
            while position[rank] < len(orders[rank]):
                action = orders[rank][position[rank]]
                arrivals = []
                for needed in inputs(action):
                    # A gradient of the activations comes from a full backward pass or from one of the inputs alone.
                    done = ready.get(needed, ready.get(needed._replace(kind="backward_input")))
                    if done is None:
                        break
                    sender = rank_of[needed.stage]
                    arrivals.append(done + (p2p(sender, rank) if sender != rank else 0.0))
                else:
                    seconds = duration(action)
                    clocks[rank] = max([clocks[rank], *arrivals]) + seconds
                    busy[rank] += seconds
                    ready[action] = clocks[rank]
                    position[rank] += 1
                    progress = True
                    continue
                break
            else:
                waiting.discard(rank)
        assert progress, "the order of computations has a cycle"
    total = max(clocks)
    return Times(total, tuple(total - seconds for seconds in busy))
