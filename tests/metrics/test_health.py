"""Loss spikes, statistics of parameters and slow ranks."""

import math
import random
import socket
import statistics
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from titanlike.metrics.health import RankStatistics, parameter_statistics
from titanlike.metrics.monitor import SpikeDetector


def decreasing_losses(num: int) -> list[float]:
    generator = random.Random(0)
    return [2 + 4 * math.exp(-step / 30) + generator.gauss(0, 0.05) for step in range(num)]


def test_a_spike_in_a_noisy_decreasing_loss_is_detected_and_nothing_else() -> None:
    losses = decreasing_losses(200)
    losses[120] += 2.0
    losses[150] = math.nan  # is reported elsewhere
    detector = SpikeDetector()
    found = {step: distance for step, loss in enumerate(losses) if (distance := detector.deviations(loss))}
    assert list(found) == [120]
    assert 10 < found[120] < 100


@pytest.mark.parametrize("num_losses", [9, 10, 50, 51])
def test_the_distance_of_a_spike_is_in_standard_deviations_of_the_window(num_losses: int) -> None:
    """That of a normal distribution is 1.4826 times its median absolute deviation. The window has 50 losses."""
    losses = [100.0, *map(float, range(num_losses - 1))]
    window = losses[-50:]
    median = statistics.median(window)
    deviation = 1.4826 * statistics.median(abs(loss - median) for loss in window)
    for distance, expected in ((9.99, 0.0), (10.01, 10.01)):
        detector = SpikeDetector()
        for loss in losses:
            detector.deviations(loss)
        found = detector.deviations(median + distance * deviation)
        assert found == pytest.approx(expected if num_losses >= 10 else 0.0)


def test_a_loss_of_zero_is_no_spike() -> None:
    """The loss of a batch whose labels are all masked, in every step."""
    detector = SpikeDetector()
    assert not any(detector.deviations(0.0) for _ in range(30))


def test_a_constant_loss_has_no_spikes_and_a_new_level_is_accepted() -> None:
    detector = SpikeDetector()
    assert not any(detector.deviations(2.0 + 1e-4 * (step % 2)) for step in range(30))
    assert sum(detector.deviations(3.0) > 0 for _ in range(100)) <= 30


def test_statistics_of_an_update() -> None:
    model = nn.Linear(2, 2)
    unused = nn.Parameter(torch.ones(1))
    model.register_parameter("unused", unused)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        model.bias = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    model.weight.grad, model.bias.grad = torch.full((2, 2), 2.0), torch.ones_like(model.bias)
    with parameter_statistics(model) as values:
        model.weight.grad.mul_(0.1)  # clipped: the norm is that before
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert values == pytest.approx(
        {
            "layers/grad_norm/weight": 4.0, "layers/weight_norm/weight": 5.0, "layers/update_ratio/weight": 0.04,
            "layers/grad_norm/bias": math.sqrt(2), "layers/weight_norm/bias": 0.0, "layers/update_ratio/bias": 0.0,
        }
    )  # fmt: skip


@pytest.mark.usefixtures("alone")
def test_the_matmul_of_a_gpu_is_that_of_the_call_before() -> None:
    """The host does not wait for one that has not finished."""
    ranks = RankStatistics(torch.device("cpu"))
    calls: list[str] = []
    events: Any = (SimpleNamespace(record=partial(calls.append, name)) for name in ("begin", "end"))
    ranks._events = [begin, end] = list(events)
    begin.elapsed_time, end.query = lambda other: 500.0 * calls.count("end") + 250.0, lambda: calls.count("end") != 2
    found = [ranks.gather(0.25)[0, 1:].tolist() for _ in range(4)]
    assert found == [[0.25, seconds] for seconds in (0.0, 0.75, 0.75, 1.75)]
    assert calls == ["begin", "end"] * 4


@pytest.mark.usefixtures("alone")
def test_a_slow_rank_is_named_once() -> None:
    ranks = RankStatistics(torch.device("cpu"))
    assert ranks.names == [f"rank 0 (host {socket.gethostname()}, cpu)"]
    ranks.names = [f"rank {rank} (host a, cuda:{rank})" for rank in range(4)]
    even = [1.0, 0.0, 0.010, 2.0, 0.5, 0.011, 1.5, 0.1, 0.009, 1.0, 0.0, 0.010]
    slow = [1.0, 0.0, 0.010, 2.0, 0.5, 0.011, 1.5, 0.1, 0.020, 1.0, 0.0, 0.010]
    values, warning = ranks.summarize(even)
    assert values == {
        "max_memory_gib": 2.0, "max_data_wait_seconds": 0.5, "slowest_rank": 1, "slowest_rank_ratio": pytest.approx(1.1),
    }  # fmt: skip
    assert warning == ""
    warnings = [ranks.summarize(slow)[1] for _ in range(6)]
    message = "rank 2 (host a, cuda:2) is slow: it takes 2.0 times as long as the median rank for the same matmul"
    assert warnings == ["", "", message, "", "", ""]
    for slow_ranks, ratio, is_slow in (([2] * 3, 1.31, True), ([2] * 3, 1.29, False), ([2, 2, 1], 2.0, False)):
        ranks = RankStatistics(torch.device("cpu"))
        ranks.names = [f"rank {rank}" for rank in range(4)]
        rows = [[0.01 * (ratio if rank == each else 1.0) for rank in range(4)] for each in slow_ranks]
        found = [ranks.summarize([value for one in row for value in (1.0, 0.0, one)])[1] for row in rows]
        assert [bool(warning) for warning in found] == [False, False, is_slow]
