"""Calibration: the file that it writes describes hardware, with figures that are positive and finite."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.pool import Ranks
from titanlike.tools.planning.calibrate import calibrate, fit_half, link_speed
from titanlike.tools.planning.hardware import load_hardware


def _calibrate(path: str, ranks_per_node: int) -> list[tuple[str, int, int]]:
    shown: list[tuple[str, int, int]] = []

    def on_progress(text: str, done: int, total: int) -> None:
        shown.append((text, done, total))

    calibrate(torch.device("cpu"), Path(path), on_progress, seconds=0.05, ranks_per_node=ranks_per_node)
    return shown


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2), (2, 1)])
def test_writes_a_hardware_file(ranks: Ranks, tmp_path: Path, num_ranks: int, ranks_per_node: int) -> None:
    path = tmp_path / "mine.toml"
    shown = ranks(num_ranks).run(_calibrate, str(path), ranks_per_node)[0]
    assert [done for _, done, _ in shown] == [0, 1, 2, 3, 4] and {total for _, _, total in shown} == {4}
    hardware = load_hardware(str(path))
    written = {line.partition(" = ")[0] for line in path.read_text().split("\n") if " = " in line and line[0] != "#"}
    values = {key: getattr(hardware, key) for key in written if key != "name"}
    may_be_zero = {"gemm_half_size", "attention_half_length", "network_latency_us"}
    assert all(math.isfinite(value) and (value > 0 or key in may_be_zero) for key, value in values.items())
    assert hardware.gpus_per_node == ranks_per_node
    if num_ranks > ranks_per_node:  # collectives of one rank per node are what it has measured
        assert hardware.network_fraction == hardware.single_fraction == 1.0
    assert hardware.dollars_per_gpu_hour == 0
    text = path.read_text()
    assert ("Not measured: one process" in text) == (ranks_per_node == 1)
    assert ("Not measured: one node" in text) == (num_ranks == ranks_per_node)
    assert ("node_latency_us" in written) == (ranks_per_node > 1)
    # Each key has a comment before it.
    lines = [line for line in text.split("\n") if line]
    assert all(before.startswith("#") for before, line in pairwise(lines) if not line.startswith("#"))


@pytest.mark.parametrize("half", [0.0, 100.0, 1000.0])
def test_fit_recovers_the_rates_that_it_assumes(half: float) -> None:
    rates = {size: 5e12 * (size / (size + half)) ** 3 for size in (256, 512, 1024, 2048)}
    limit, found = fit_half(rates, 3)
    assert limit == pytest.approx(5e12, rel=0.1) and found == pytest.approx(half, rel=0.1)
    assert fit_half({256: 1e12}, 3) == (1e12, 0.0)


def test_bandwidth_and_latency_of_two_sizes() -> None:
    times = {size: 20e-6 + size * 7 / 8 / 300e9 for size in (2**10, 2**30)}
    reduced = {size: 2 * seconds for size, seconds in times.items()}
    bandwidth, latency, _ = link_speed({"all-gather": times, "reduce-scatter": times, "all-reduce": reduced}, 8)
    assert bandwidth == pytest.approx(300) and latency == pytest.approx(20e-6, rel=1e-3)
