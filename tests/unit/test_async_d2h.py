"""Asynchronous copies to the host: on a GPU, a step is checked and recorded one step later. Simulated on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from tests.unit.test_metrics import build_monitor, records
from titanlike.config import UserError
from titanlike.config.sections import Metrics
from titanlike.optim.clipping import Norms
from titanlike.optim.non_finite import NonFiniteGuard
from titanlike.utils.async_d2h import AsyncD2H


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncD2H, "is_on_host", False)


def norms(value: float) -> Norms:
    return Norms(torch.tensor(value), torch.tensor([1.0, value]), ["first", "second"])


def check_steps(guard: NonFiniteGuard, values: list[float]) -> None:
    for step, value in enumerate(values, start=1):
        guard.should_step(step, torch.tensor(1.0), torch.tensor(1.0), norms(value))


def test_values_keep_their_order_across_dtypes() -> None:
    found = AsyncD2H(torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor([3.0, 4.0]))
    assert found.is_on_host and found.read() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.usefixtures("delayed", "alone")
def test_a_non_finite_step_is_detected_at_the_next_step() -> None:
    guard = NonFiniteGuard()
    check_steps(guard, [1.0, 2.0, float("nan")])
    with pytest.raises(UserError, match=r"step 3: the loss is finite, but not the gradient of second"):
        guard.should_step(4, torch.tensor(1.0), torch.tensor(1.0), norms(1.0))


@pytest.mark.usefixtures("delayed", "alone")
def test_a_non_finite_last_step_is_detected_by_flush() -> None:
    guard = NonFiniteGuard()
    check_steps(guard, [1.0, float("inf")])
    with pytest.raises(UserError, match="step 2: "):
        guard.flush()
    guard.flush()  # raises once


@pytest.mark.usefixtures("delayed")
def test_flush_checks_the_pending_step() -> None:
    guard = NonFiniteGuard()
    check_steps(guard, [1.0, 2.0, 3.0])
    assert len(guard.pending) == 1
    guard.flush()
    assert not guard.pending


@pytest.mark.usefixtures("delayed", "alone")
def test_skipping_checks_a_step_before_the_optimizer_update() -> None:
    guard = NonFiniteGuard("skip")
    one = torch.tensor(1.0)
    assert [guard.should_step(step, one, one, norms(value)) for step, value in enumerate([1.0, float("nan"), 1.0])] == [
        True, False, True,
    ]  # fmt: skip
    assert not guard.pending


@pytest.mark.usefixtures("delayed")
def test_a_skipped_step_is_recorded_in_order(tmp_path: Path) -> None:
    with build_monitor(tmp_path, section=Metrics(interval=1, trackers=())) as monitor:
        for step in range(1, 4):
            if step == 2:
                monitor.skipped(2, "the loss is nan on rank 0")
            monitor.step(step, loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0), learning_rate=0.1)
    assert [(record["step"], "skipped" in record) for record in records(tmp_path)] == [
        (1, False),
        (2, True),
        (2, False),
    ]


@pytest.mark.usefixtures("delayed")
def test_a_step_is_recorded_at_the_next_step_and_none_is_lost(tmp_path: Path) -> None:
    with build_monitor(tmp_path, num_steps=6) as monitor:
        for step in range(1, 7):
            monitor.step(step, loss=torch.tensor(float(step)), grad_norm=torch.tensor(1.0), learning_rate=0.1)
            if step == 4:
                assert [record["step"] for record in records(tmp_path)] == [1, 2]
                with monitor.exclude_from_throughput():
                    assert [record["step"] for record in records(tmp_path)] == [1, 2, 4]
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in found] == [(1, 1.0), (2, 2.0), (4, 4.0), (6, 6.0)]
