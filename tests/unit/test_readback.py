"""On a GPU a step is looked at one step later. Here the numbers are made to arrive late without one."""

import json
from pathlib import Path

import pytest
import torch

from tests.unit.test_metrics import monitor, records
from titanlike.config import UserError
from titanlike.optim.clipping import Norms
from titanlike.optim.non_finite import NonFiniteGuard
from titanlike.utils.async_d2h import AsyncD2H


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncD2H, "here", False)


def norms(value: float) -> Norms:
    return Norms(torch.tensor(value), torch.tensor([1.0, value]), ["first", "second"])


def looks(guard: NonFiniteGuard, values: list[float]) -> None:
    for step, value in enumerate(values, start=1):
        guard.should_step(step, torch.tensor(1.0), torch.tensor(1.0), norms(value))


def test_numbers_come_in_their_order_whatever_their_type() -> None:
    found = AsyncD2H(torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor([3.0, 4.0]))
    assert found.here and found.read() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.usefixtures("late", "alone")
def test_a_bad_step_is_found_at_the_next_one() -> None:
    guard = NonFiniteGuard()
    looks(guard, [1.0, 2.0, float("nan")])
    with pytest.raises(UserError, match=r"step 3: the loss is finite, but not the gradient of second"):
        guard.should_step(4, torch.tensor(1.0), torch.tensor(1.0), norms(1.0))


@pytest.mark.usefixtures("late", "alone")
def test_a_bad_last_step_is_found_by_who_catches_up() -> None:
    guard = NonFiniteGuard()
    looks(guard, [1.0, float("inf")])
    with pytest.raises(UserError, match="step 2: "):
        guard.flush()
    guard.flush()  # once is enough


@pytest.mark.usefixtures("late")
def test_good_steps_pass_and_none_is_left() -> None:
    guard = NonFiniteGuard()
    looks(guard, [1.0, 2.0, 3.0])
    assert len(guard.pending) == 1
    guard.flush()
    assert not guard.pending


@pytest.mark.usefixtures("late", "alone")
def test_who_skips_looks_before_the_optimizer_does() -> None:
    guard = NonFiniteGuard("skip")
    one = torch.tensor(1.0)
    assert [guard.should_step(step, one, one, norms(value)) for step, value in enumerate([1.0, float("nan"), 1.0])] == [
        True, False, True,
    ]  # fmt: skip
    assert not guard.pending


@pytest.mark.usefixtures("late")
def test_a_skipped_step_is_recorded_after_those_before_it(tmp_path: Path) -> None:
    with monitor(tmp_path, interval=1) as watched:
        for step in range(1, 4):
            if step == 2:
                watched.skipped(2, "the loss is nan on rank 0")
            watched.step(step, loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0), learning_rate=0.1)
    assert [(record["step"], "skipped" in record) for record in records(tmp_path)] == [
        (1, False),
        (2, True),
        (2, False),
    ]


@pytest.mark.usefixtures("late")
def test_a_record_waits_for_the_next_step_and_nothing_is_lost(tmp_path: Path) -> None:
    with monitor(tmp_path, num_steps=6, interval=2) as watched:
        for step in range(1, 7):
            watched.step(step, loss=torch.tensor(float(step)), grad_norm=torch.tensor(1.0), learning_rate=0.1)
            if step == 4:
                assert [record["step"] for record in records(tmp_path)] == [1, 2]
                with watched.exclude_from_throughput():
                    assert [record["step"] for record in records(tmp_path)] == [1, 2, 4]
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in found] == [(1, 1.0), (2, 2.0), (4, 4.0), (6, 6.0)]
