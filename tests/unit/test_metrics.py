"""Rates are tokens over measured seconds; what is not known is not made up."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titanlike.metrics import Monitor
from titanlike.metrics.hardware import peak_flops


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    turned = Clock()
    monkeypatch.setattr(time, "perf_counter", turned)
    return turned


def monitor(folder: Path | None, **changed: Any) -> Monitor:
    options: dict[str, Any] = dict(
        folder=folder, device=torch.device("cpu"), num_devices=2, first_step=1, num_steps=5, tokens_per_step=1000,
        flops_per_token=10**9, interval=2, tensorboard=False,
    )  # fmt: skip
    return Monitor(**options | changed)


def step(watched: Monitor, number: int) -> None:
    watched.step(number, loss=torch.tensor(2.5), grad_norm=torch.tensor(0.5), learning_rate=0.1)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rates_count_data_wait_and_leave_out_validation_and_saving(tmp_path: Path, clock: Clock) -> None:
    with monitor(tmp_path) as watched:
        clock.now += 4.0
        step(watched, 1)
        with watched.exclude_from_throughput():
            clock.now += 50.0
        with watched.data_wait():
            clock.now += 0.5
        clock.now += 1.5
        step(watched, 2)
        clock.now += 1.0
        step(watched, 3)
        clock.now += 3.0
        step(watched, 4)
        clock.now += 1.0
        step(watched, 5)
    first, second, fourth, last = records(tmp_path)
    assert [record["step"] for record in (first, second, fourth, last)] == [1, 2, 4, 5]
    assert (first["tokens_per_second"], second["tokens_per_second"]) == (250.0, 500.0)
    assert second["data_wait"] == 0.25
    assert (fourth["tokens_per_second"], fourth["step_seconds"], fourth["data_wait"]) == (500.0, 2.0, 0.0)
    assert fourth["tflops_per_device"] == pytest.approx(500 * 1e9 / 2 / 1e12)
    assert (fourth["tokens"], fourth["elapsed_seconds"], fourth["loss"]) == (4000, 60.0, 2.5)
    assert fourth["mfu"] is None  # a CPU has no published peak
    assert fourth["memory_gib"] > 0.05


def test_mfu_is_a_share_of_the_published_peak(tmp_path: Path, clock: Clock) -> None:
    with monitor(tmp_path, num_steps=1) as watched:
        watched.peak = 1e12
        clock.now += 1.0
        step(watched, 1)
    assert records(tmp_path)[0]["mfu"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA L400", None),
        ("cpu", None),
    ],
)
def test_only_known_hardware_has_a_peak(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_plain_lines_where_there_is_no_terminal(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with monitor(tmp_path) as watched:
        clock.now += 1.0
        step(watched, 1)
        watched.validation(1, 2.25)
        watched.print("[a note] with brackets")
    out = capsys.readouterr().out
    assert "step      1/5  loss 2.5000  1000 tok/s  0:04 left  grad 0.50  lr 1.0e-01  0.5 TFLOP/s  MFU unknown" in out
    assert "step      1/5  val 2.2500" in out
    assert "[a note] with brackets" in out
    assert "\x1b" not in out


def test_a_skipped_step_is_said_and_kept_in_json_that_anyone_can_read(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with monitor(tmp_path, tensorboard=True) as watched:
        clock.now += 1.0
        watched.skipped(2, "the loss is nan on rank 1")
        watched.step(2, loss=torch.tensor(float("nan")), grad_norm=torch.tensor(float("inf")), learning_rate=0.1)
        watched.validation(2, float("nan"))
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
    assert [event.step for event in events.Tensors("skipped/text_summary")] == [2]
    assert "learning_rate" in events.Tags()["scalars"]
    assert not {"loss", "grad_norm", "validation_loss"} & set(events.Tags()["scalars"])


def test_a_rank_without_a_folder_says_and_keeps_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with monitor(None, tensorboard=True) as watched:
        step(watched, 2)
        watched.validation(2, 1.0)
        watched.skipped(2, "the loss is nan on rank 0")
        watched.print("x")
    assert capsys.readouterr().out == ""


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    with monitor(tmp_path, tensorboard=True) as watched:
        step(watched, 2)
        watched.validation(2, 1.25)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(2, 2.5)]
    assert [(event.step, event.value) for event in events.Scalars("validation_loss")] == [(2, 1.25)]
    assert "mfu" not in events.Tags()["scalars"]
