"""Throughput, MFU, console output, metrics files, and values that arrive one step later, as on a GPU."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launching import records
from titanlike.checkpoint import SaveResult
from titanlike.config import UserError
from titanlike.config.sections import Metrics, Training
from titanlike.hardware.files import file_of_device, peak_flops
from titanlike.metrics import Monitor, model_statistics
from titanlike.optim.clipping import Norms
from titanlike.optim.non_finite import NonFiniteGuard
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks import check_machine
from titanlike.utils.async_d2h import AsyncD2H

TENSORBOARD = Metrics(interval=2, trackers=("tensorboard",))


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "perf_counter", fake)
    return fake


def build_monitor(folder: Path | None, **overrides: Any) -> Monitor:
    options: dict[str, Any] = dict(
        folder=folder, device=torch.device("cpu"), num_devices=2, first_step=1, num_steps=5, num_tokens=lambda step: 1000 * step,
        flops_per_token=10**9, section=Metrics(interval=2, trackers=()), recipe={},
    )  # fmt: skip
    return Monitor(**options | overrides)


def step(monitor: Monitor, number: int) -> None:
    monitor.step(number, loss=torch.tensor(2.5), grad_norm=torch.tensor(0.5), lr=0.1)


def test_throughput_includes_data_wait_and_excludes_validation_and_checkpointing(tmp_path: Path, clock: Clock) -> None:
    ramp = [0, 1000, 2000, 4000, 6000, 8000]  # tokens of all steps up to one
    with build_monitor(tmp_path, num_tokens=ramp.__getitem__) as monitor:
        clock.now += 4.0
        step(monitor, 1)
        with monitor.exclude_from_throughput():
            clock.now += 50.0
        with monitor.data_wait():
            clock.now += 0.5
        clock.now += 1.5
        step(monitor, 2)
        clock.now += 1.0
        step(monitor, 3)
        clock.now += 3.0
        step(monitor, 4)
        clock.now += 1.0
        step(monitor, 5)
    assert monitor.measured().tokens_per_second == 1000.0  # the median, without the first record
    first, second, fourth, last = records(tmp_path)
    assert [record["step"] for record in (first, second, fourth, last)] == [1, 2, 4, 5]
    assert (first["tokens_per_second"], second["tokens_per_second"]) == (250.0, 500.0)
    assert second["data_wait"] == 0.25
    assert (fourth["tokens_per_second"], fourth["step_seconds"], fourth["data_wait"]) == (1000.0, 2.0, 0.0)
    assert last["tokens_per_second"] == 2000.0
    assert fourth["tflops_per_device"] == pytest.approx(1000 * 1e9 / 2 / 1e12)
    assert (fourth["tokens"], fourth["elapsed_seconds"], fourth["loss"]) == (6000, 60.0, 2.5)
    assert fourth["mfu"] is None  # a CPU has no published peak
    assert fourth["memory_gib"] > 0.05


PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989.4, "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A10G": 70, "NVIDIA L40S": 362, "NVIDIA L4": 121, "NVIDIA GH200 480GB": 989.4, "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    # What resembles a known GPU, and instances of one (MIG), whose names do not say which share of it they have.
    "NVIDIA GeForce RTX 4090 D": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA A10": None,
    "NVIDIA H200 MIG 1g.18gb": None, "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb": None, "cpu": None,
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_unknown_hardware_is_unknown(name: str) -> None:
    tflops = PEAKS[name]
    assert peak_flops(file_of_device(name)) == (tflops and pytest.approx(tflops * 1e12))


def test_mfu_refers_to_the_hardware_of_the_recipe(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = "h100"\nbf16_tflops = 0.001\n')
    with build_monitor(tmp_path, num_steps=1, section=Metrics(interval=2, trackers=(), hardware=str(file))) as monitor:
        clock.now += 1.0
        step(monitor, 1)
    (record,) = records(tmp_path)
    assert record["mfu"] == pytest.approx(record["tflops_per_device"] / 0.001)
    recipe = PretrainRecipe()
    for text, message in (
        ("bf16_tflops = 0", "metrics.hardware = .*mine.toml: bf16_tflops = 0 is not valid"),
        ("[", "metrics.hardware = .*mine.toml: Invalid initial character"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            check_machine(replace(recipe, metrics=replace(recipe.metrics, hardware=str(file))))


def test_plain_lines_without_a_terminal(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with build_monitor(tmp_path) as monitor:
        clock.now += 1.0
        step(monitor, 1)
        monitor.validation(1, 2.25)
        monitor.print("[a note] with brackets")
    out = capsys.readouterr().out
    assert "step      1/5  loss 2.5000  1000 tok/s  grad 0.50  lr 1.0e-01  0.5 TFLOP/s  " in out
    assert "step      1/5  val 2.2500" in out
    assert "[a note] with brackets" in out
    assert "\x1b" not in out


def test_a_skipped_step_is_printed_and_recorded_in_valid_json(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with build_monitor(tmp_path, section=TENSORBOARD) as monitor:
        clock.now += 1.0
        monitor.skipped(2, "the loss is nan on rank 1")
        monitor.step(2, loss=torch.tensor(float("nan")), grad_norm=torch.tensor(float("inf")), lr=0.1)
        monitor.validation(2, float("nan"))
    skipped, taken, validation = (
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert skipped == {"step": 2, "skipped": "the loss is nan on rank 1", "elapsed_seconds": 1.0}
    assert (taken["step"], taken["loss"], taken["grad_norm"], taken["learning_rate"]) == (2, None, None, 0.1)
    assert taken["tokens_per_second"] == 1000.0
    assert validation["validation_loss"] is None
    out = capsys.readouterr().out
    assert "step      2/5  skipped: the loss is nan on rank 1\n" in out
    assert "step      2/5  loss nan  1000 tok/s" in out
    assert "step      2/5  val nan" in out
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("train/skipped/text_summary")] == [2]
    assert "train/learning_rate" in events.Tags()["scalars"]
    assert not {"train/loss", "train/grad_norm", "validation/loss"} & set(events.Tags()["scalars"])


def test_a_loss_spike_is_recorded_and_warned_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [2.0 + 0.01 * (number % 3) for number in range(20)]
    with build_monitor(tmp_path, num_steps=25, section=Metrics(interval=1, trackers=())) as monitor:
        for number, loss in enumerate([*losses, 9.0, 9.0, 2.0], start=1):
            monitor.step(number, loss=torch.tensor(loss), grad_norm=torch.tensor(0.5), lr=0.1)
    assert [record["step"] for record in records(tmp_path) if record.get("loss_spike", 0) > 10] == [21, 22]
    output = capsys.readouterr().out
    assert "warning: step 21: loss spike: 9.0000 is " in output and output.count("loss spike") == 1


def test_warnings_of_ranks_are_printed_and_their_statistics_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks: Any = SimpleNamespace(
        gather=lambda wait: torch.tensor([[1.0, wait, 2.0]] * 2),
        summarize=lambda values: ({"slowest_rank": len(values) // 3}, "rank 1 is slow"),
    )
    with build_monitor(tmp_path, section=Metrics(interval=1, trackers=())) as monitor:
        monitor._ranks = ranks
        step(monitor, 1)
    assert [record["slowest_rank"] for record in records(tmp_path)] == [2]
    assert "warning: rank 1 is slow" in capsys.readouterr().out


def test_what_a_model_counts_is_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    counter = SimpleNamespace(measure=lambda: calls.append("measure") or {}, reset=lambda: calls.append("reset"))
    monkeypatch.setattr(model_statistics, "model_statistics", lambda *_: counter)
    with build_monitor(tmp_path) as monitor:
        for number in (1, 2, 3):
            with monitor.model_statistics(number, torch.nn.Linear(1, 1)):
                calls.append(number)
    assert calls == ["measure", 1, "reset", "measure", 2, "reset", 3, "reset"]


def test_saves_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with build_monitor(tmp_path) as monitor:
        for step, error, cleanup_error in ((3, "", ""), (4, "full", ""), (5, "", "denied")):
            monitor.record_saves([SaveResult(step, 10, 0.5, 2.0, error, cleanup_error)])
    seconds = {"save_seconds": 2.0, "save_stall_seconds": 0.5, "save_bytes": 10}
    assert records(tmp_path) == [{"step": 3, **seconds}, {"step": 4, "save_failed": "full"}, {"step": 5, **seconds}]
    output = capsys.readouterr().out
    assert "warning: saving the checkpoint of step 4 failed: full; training continues" in output
    assert "warning: the checkpoint of step 5 is saved, but the cleanup failed: denied" in output


def test_a_rank_without_a_folder_prints_and_records_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with build_monitor(None, section=TENSORBOARD) as monitor:
        step(monitor, 2)
        monitor.validation(2, 1.0)
        monitor.skipped(2, "the loss is nan on rank 0")
        monitor.print("x")
    assert capsys.readouterr().out == ""


# Asynchronous copies to the host: on a GPU, a step is checked and recorded one step later. Simulated on a CPU.


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncD2H, "is_on_host", False)


def norms(value: float) -> Norms:
    return Norms(torch.tensor(value), torch.tensor([1.0, value]), ["first", "second"])


def check_steps(guard: NonFiniteGuard, values: list[float]) -> None:
    for step, value in enumerate(values, start=1):
        guard.should_step(step, torch.tensor(1.0), torch.tensor(1.0), norms(value), torch.tensor(1))


@pytest.mark.usefixtures("delayed", "alone")
def test_a_non_finite_step_is_detected_at_the_next_step_and_the_last_one_by_flush() -> None:
    guard = NonFiniteGuard(Training())
    check_steps(guard, [1.0, 2.0, float("nan")])
    with pytest.raises(UserError, match=r"step 3: the loss is finite, but not the gradient of second"):
        guard.should_step(4, torch.tensor(1.0), torch.tensor(1.0), norms(1.0), torch.tensor(1))
    guard = NonFiniteGuard(Training())
    check_steps(guard, [1.0, float("inf")])
    with pytest.raises(UserError, match="step 2: "):
        guard.flush()
    guard.flush()  # raises once


@pytest.mark.usefixtures("delayed", "alone")
def test_skipping_checks_a_step_before_the_optimizer_update() -> None:
    guard = NonFiniteGuard(Training(non_finite="skip"))
    one = torch.tensor(1.0)
    assert [guard.should_step(step, one, one, norms(value), one) for step, value in enumerate([1.0, float("nan"), 1.0])] == [
        True, False, True,
    ]  # fmt: skip
    assert not guard.pending


@pytest.mark.usefixtures("delayed")
def test_a_step_is_recorded_at_the_next_step_and_none_is_lost(tmp_path: Path) -> None:
    with build_monitor(tmp_path, num_steps=6) as monitor:
        for step in range(1, 7):
            monitor.step(step, loss=torch.tensor(float(step)), grad_norm=torch.tensor(1.0), lr=0.1)
            if step == 4:
                assert [record["step"] for record in records(tmp_path)] == [1, 2]
                with monitor.exclude_from_throughput():
                    assert [record["step"] for record in records(tmp_path)] == [1, 2, 4]
    assert [(record["step"], record["loss"]) for record in records(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (4, 4.0),
        (6, 6.0),
    ]


@pytest.mark.usefixtures("delayed")
@pytest.mark.parametrize("device_is_faster", [True, False])
def test_speed_around_a_validation_is_that_of_other_steps(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, device_is_faster: bool
) -> None:
    """A step is recorded when the next one is enqueued, or earlier, before a validation. The host waits for a slower device."""
    monkeypatch.setattr(AsyncD2H, "is_complete", device_is_faster)
    read = AsyncD2H.read

    def read_after_waiting(values: AsyncD2H, *, deferred: bool = False) -> list[float]:
        clock.now += 0.0 if device_is_faster else 1.0
        return read(values, deferred=deferred)

    monkeypatch.setattr(AsyncD2H, "read", read_after_waiting)
    with build_monitor(tmp_path, num_steps=12, section=Metrics(interval=1, trackers=())) as monitor:
        for number in range(1, 13):
            clock.now += 1.0 if device_is_faster else 0.0
            step(monitor, number)
            if number == 6:
                with monitor.exclude_from_throughput("validating"):
                    clock.now += 50.0
    assert [record["step_seconds"] for record in records(tmp_path)] == [1.0] * 12
