"""The order of computations of each pipeline rank against torch's own schedules, and the simulated time against closed formulas."""

import pytest

from titanlike.config.layout import SCHEDULES, stages_of
from titanlike.tools.planning.schedules import Kind, Order, order, simulate_time

SEVERAL_STAGES = [name for name, schedule in SCHEDULES.items() if schedule.stages_per_rank > 1]


@pytest.mark.parametrize("schedule", SEVERAL_STAGES)
def test_several_stages_per_rank_compute_each_micro_batch_once(schedule: str) -> None:
    num_ranks, num_microbatches = 4, 8
    num_stages = num_ranks * SCHEDULES[schedule].stages_per_rank
    by_rank = order(schedule, num_ranks, num_stages, num_microbatches)
    splits_backward = any(action.kind == "backward_weight" for of_rank in by_rank for action in of_rank)
    assert splits_backward == SCHEDULES[schedule].splits_backward
    for rank, of_rank in enumerate(by_rank):
        stages = stages_of(rank, num_ranks, num_stages, v_shaped=SCHEDULES[schedule].v_shaped)
        for stage in stages:
            for i in range(num_microbatches):
                kinds = [action.kind for action in of_rank if (action.stage, action.microbatch) == (stage, i)]
                assert kinds in (["forward", "backward"], ["forward", "backward_input", "backward_weight"])
        assert len(set(of_rank)) == len(of_rank)
        assert {action.stage for action in of_rank} == set(stages)


def durations(num_stages: int) -> dict[tuple[int, Kind], float]:
    """A backward pass takes twice as long as a forward pass, and half of it is for the weights."""
    times: dict[Kind, float] = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
    return {(stage, kind): seconds for stage in range(num_stages) for kind, seconds in times.items()}


def bubble(orders: Order, num_stages: int) -> float:
    times = simulate_time(orders, durations(num_stages))
    return times.idle[0] / times.seconds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (4, 4), (4, 13), (8, 8)])
def test_bubble_of_one_stage_per_rank(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    orders = order(schedule, num_ranks, num_ranks, num_microbatches)
    assert bubble(orders, num_ranks) == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))


def test_bubbles_of_several_stages_per_rank() -> None:
    num_ranks, num_microbatches = 4, 8
    plain = bubble(order("1f1b", num_ranks, num_ranks, num_microbatches), num_ranks)
    for stages_per_rank in (2, 3):
        num_stages = stages_per_rank * num_ranks
        interleaved = bubble(order("interleaved_1f1b", num_ranks, num_stages, num_microbatches), num_stages)
        assert interleaved == pytest.approx((num_ranks - 1) / (stages_per_rank * num_microbatches + num_ranks - 1))
        assert interleaved < plain
    interleaved = bubble(order("interleaved_1f1b", num_ranks, 2 * num_ranks, num_microbatches), 2 * num_ranks)
    for schedule in ("zero_bubble", "zbv", "dualpipev"):
        assert bubble(order(schedule, num_ranks, 2 * num_ranks, num_microbatches), 2 * num_ranks) < interleaved / 2


def test_the_slowest_stage_and_the_transfers_determine_the_time() -> None:
    orders = order("1f1b", 2, 2, 3)
    slow = durations(2) | {(1, "forward"): 2.0, (1, "backward"): 4.0}
    # The first forward and the last backward pass of stage 0, and all of stage 1 in between.
    assert simulate_time(orders, slow).seconds == 1.0 + 3 * 6.0 + 2.0
    assert simulate_time(orders, slow).idle == (21.0 - 9.0, 3.0)
    # Micro-batches 0 and 2 are on the critical path, each there and back.
    assert simulate_time(orders, durations(2), p2p=lambda *_: 0.25).seconds == 12.0 + 4 * 0.25
    by_action = simulate_time(orders, lambda action: 10.0 if action.microbatch == 2 else 0.0)
    assert by_action.seconds == 40.0
