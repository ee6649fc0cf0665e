"""The console of a run: the status on a terminal and the permanent lines above it."""

import math

import pytest

from titanlike.metrics.terminal import PERMANENT_INTERVAL, Console, sparkline


class Terminal(Console):
    """A console on a terminal that keeps what it shows."""

    def __init__(self, num_steps: int, first_step: int = 1) -> None:
        self.lines: list[str] = []
        self.status = ""
        super().__init__(num_steps, first_step)
        self.is_terminal = self._draws_bars = True
        self.refresh()

    def print(self, *parts: str | tuple[str, str]) -> None:
        self.lines.append("".join(part if isinstance(part, str) else part[0] for part in parts))

    def update(self, text: str, completed: float | None = None, total: float | None = None) -> None:
        self.status, self.completed = text, completed


def training(loss: float, elapsed: float, **others: float | None) -> dict[str, float | None]:
    return dict(
        loss=loss, grad_norm=0.5, learning_rate=1e-3, tokens_per_second=1000.0, tflops_per_device=2.0, mfu=0.25,
        memory_gib=1.5, data_wait=0.02, elapsed_seconds=elapsed,
    ) | others  # fmt: skip


def test_status() -> None:
    console = Terminal(100)
    assert console.status == "step      1/100  warming up"
    console.log(1, training(4.0, 60.0))  # compiles for a minute
    assert "left" not in console.status + console.lines[0]
    console.log(2, training(3.0, 61.0))
    console.log(3, training(2.0, 62.0))
    assert console.status.split("\n") == [
        "step      3/100  0:01:37 left",
        "loss 2.0000  █▅▁  grad 0.50  lr 1.0e-03",
        "1000 tok/s  2 TFLOP/s  MFU 25.0%  1.50 GiB  data wait 2.0%",
    ]
    assert console.completed == 3


def test_the_remaining_time_follows_the_last_records_and_ends_with_the_run() -> None:
    console = Terminal(1000)
    for step in range(1, 101):
        console.log(step, training(1.0, float(step)))
    assert "0:15:00 left" in console.status
    for step in range(101, 201):  # ten times slower, for example because the machine is busy
        console.log(step, training(1.0, 100.0 + 10.0 * (step - 100)))
    assert "2:13:20 left" in console.status
    console.log(1000, training(1.0, 2000.0))
    assert "left" not in console.status + console.lines[-1]


def test_permanent_lines() -> None:
    console = Terminal(1000)
    num_records = 2 * PERMANENT_INTERVAL + 1
    for step in range(1, num_records + 1):
        console.log(step, training(1.0, float(step)))
    assert [line[:16] for line in console.lines] == ["step      1/1000", "step     11/1000", "step     21/1000"]
    console.log(21, {"validation_loss": 2.5})
    console.log(21, {"save_seconds": 1.0, "save_stall_seconds": 0.5, "save_bytes": 2.0**20})
    assert console.lines[3:] == [
        "step     21/1000  val 2.5000",
        "step     21/1000  saved  1.0 MiB in 1.00 s; training paused for 0.50 s",
    ]


def test_validation_and_checkpoint_in_the_status() -> None:
    console = Terminal(100)
    console.log(10, training(1.0, 1.0))
    for step, loss in ((10, 2.5), (20, 2.25), (30, 2.75), (40, math.nan)):
        console.log(step, {"validation_loss": loss})
    assert [line.split("val ")[1] for line in console.lines[1:]] == [
        "2.5000", "2.2500", "2.7500 (best 2.2500, step 20)", "nan",
    ]  # fmt: skip
    console.log(30, {"validation_loss": 2.75})
    assert "  val 2.7500 (best 2.2500, step 20)  grad" in console.status
    console.refresh("saving")
    assert console.status.startswith("step     10/100  saving\n")
    console.refresh()
    console.log(10, {"save_seconds": 1.0, "save_stall_seconds": 0.5, "save_bytes": 1e6})
    assert console.status.startswith("step     10/100\n") and console.status.endswith("  saved step 10")


def test_terms_of_preferences_and_of_a_teacher() -> None:
    console = Terminal(10)
    console.log(1, training(0.69, 1.0) | {"rewards/accuracies": 0.5, "rewards/margins": -0.0123})
    console.log(1, {"validation_loss": 0.6, "validation_accuracy": 0.625})
    console.log(2, {"validation_loss": 1.5, "validation_kl": 1.0, "validation_cross_entropy": 2.0})
    assert "  lr 1.0e-03  accuracy 50.0%  margin -0.0123  " in console.lines[0]
    assert console.lines[1].endswith("  val 0.6000  accuracy 62.5%")
    assert "  val 1.5000" in console.lines[2] and console.lines[2].endswith("  kl 1.0000  cross-entropy 2.0000")


def test_a_resumed_run_starts_at_its_step() -> None:
    console = Terminal(100, first_step=51)
    assert (console.status, console.completed) == ("step     51/100  warming up", 50)


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([1.0], ""),
        ([1.0, 2.0], "  ▁█"),
        ([3.0, 3.0, 3.0], "  ▁▁▁"),
        ([8.0, math.nan, 1.0, math.inf], "  █x▁x"),
    ],
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars
