"""Monitoring a job: status changes, connection failures and Ctrl-C."""

import io
import re
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import job_status
import monitor
import pytest
from monitor import wait

from tests.cloud.aws import START, Aws, error_response, in_sequence, network_down, no_change
from titanlike.config import UserError

ROOT = Path(__file__).parents[2]
INTERVAL = 0.01
REATTACH = "to reattach: python sagemaker/launch.py wait {} --region us-east-1"


@pytest.fixture
def job(aws: Aws) -> str:
    return aws.running()


def test_wait_prints_each_change_once(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    job = aws.submit()
    steps = [("Starting", "Preparing"), ("Starting", "No capacity"), ("Downloading", "Image"), ("Training", "")]

    def reach(number: int) -> Callable[[], None]:
        history = [{"Status": s, "StatusMessage": m, "StartTime": START} for s, m in [steps[1], *steps[2 : number + 1]]]
        history = history if number else [{"Status": "Starting", "StatusMessage": "Preparing", "StartTime": START}]
        return lambda: aws.set_status(job, "InProgress", steps[number][0], secondary_status_transitions=history)

    polls = [reach(0), reach(0), reach(1), reach(3)]  # two changes between two polls
    aws.before("DescribeTrainingJob", in_sequence(*polls, aws.ending(job, secondary_status_transitions=[])))
    assert wait(aws.clients, job, interval=INTERVAL) == 0
    start = f"{START.astimezone():%H:%M:%S}"
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        f"{start}  Starting  Preparing",
        f"{start}  Starting  No capacity",
        f"{start}  Downloading  Image",
        f"{start}  Training",
    ]


@pytest.mark.parametrize(
    ("status", "secondary", "code", "reason"),
    [
        ("Completed", "Completed", 0, ""),
        ("Failed", "Failed", 1, "AlgorithmError: algo-2: out of memory"),
        ("Stopped", "Stopped", 143, ""),
        ("Stopped", "MaxRuntimeExceeded", 143, ""),
        ("Deleting", "Failed", 1, ""),
    ],
)
def test_exit_codes(
    aws: Aws, job: str, capsys: pytest.CaptureFixture[str], status: str, secondary: str, code: int, reason: str
) -> None:
    end = START + timedelta(hours=2)
    more = {"training_start_time": START, "training_end_time": end, "billable_time_in_seconds": 3600}
    aws.before(
        "DescribeTrainingJob",
        in_sequence(no_change, lambda: aws.set_status(job, status, secondary, failure_reason=reason or None, **more)),
    )
    assert wait(aws.clients, job, interval=INTERVAL) == code
    lines = capsys.readouterr().out.splitlines()
    resume = f"to resume from the newest checkpoint: python sagemaker/launch.py resume {job} --region us-east-1"
    assert lines[2:] == [
        f"{job}: {secondary} (2:00:00, $126.60)" + (f": {reason}" if reason else ""),
        *([resume] if code else []),
    ]


def test_a_lost_connection_is_retried(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    delays: list[float] = []
    sleep = monitor.JobMonitor._sleep

    def record(job_monitor: monitor.JobMonitor) -> None:
        delays.append(job_monitor.delay)
        sleep(job_monitor)

    monkeypatch.setattr(monitor.JobMonitor, "_sleep", record)
    monkeypatch.setattr(monitor, "MAX_DELAY", 5 * INTERVAL)
    aws.before(
        "DescribeTrainingJob",
        in_sequence(no_change, *[network_down] * 4, no_change, network_down, no_change, aws.ending(job)),
    )
    assert wait(aws.clients, job, interval=INTERVAL) == 0
    lines = capsys.readouterr().out.splitlines()
    lost = (
        'no response from AWS (Could not connect to the endpoint URL: "https://api.sagemaker.us-east-1.amazonaws.com/"): check '
        "the network, and --region us-east-1; retrying, the job keeps running"
    )
    assert lines[1:5] == [lost, "AWS responds again", lost, "AWS responds again"]
    assert [round(delay / INTERVAL) for delay in delays] == [1, 2, 4, 5, 5, 1, 2, 1, 1]


def test_permanent_errors_are_raised(aws: Aws, job: str) -> None:
    aws.before(
        "DescribeTrainingJob", in_sequence(no_change, lambda: error_response("ExpiredTokenException", "it has expired"))
    )
    with pytest.raises(UserError) as error:
        wait(aws.clients, job, interval=INTERVAL)
    assert str(error.value) == (
        "AWS rejects the credentials (ExpiredTokenException: it has expired); log in again (aws sso login, or aws "
        f"configure), or set AWS_PROFILE; the job keeps running; {REATTACH.format(job)}"
    )
    with pytest.raises(UserError, match=r"titanlike-none: no such job in us-east-1$"):
        wait(aws.clients, "titanlike-none", interval=INTERVAL)


def test_the_status_is_printed_without_a_terminal(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor, "QUIET_INTERVAL", 0.0)
    monkeypatch.setattr(job_status, "now", lambda: START + timedelta(hours=1))
    aws.set_status(job, "InProgress", "Training", training_start_time=START)
    aws.before("DescribeTrainingJob", in_sequence(no_change, no_change, aws.ending(job)))
    assert wait(aws.clients, job, interval=INTERVAL) == 0
    assert re.search(r"\nTraining for 0:00:\d\d  2 x ml\.p5\.48xlarge  \$126\.60 so far\n", capsys.readouterr().out)


# Ctrl-C.


class Terminal:
    """A terminal with typed input."""

    def __init__(self, typed: str) -> None:
        self.typed = io.StringIO(typed)

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        line = self.typed.readline()
        if line == "^C\n":
            signal.raise_signal(signal.SIGINT)
        return line


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def pressed(aws: Aws, job: str, typed: str | None, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], Any]) -> int:
    """Presses Ctrl-C at the second poll and types the answer; runs the steps, then ends the job."""
    monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
    aws.before("DescribeTrainingJob", in_sequence(no_change, press, *steps, aws.ending(job)))
    previous = signal.getsignal(signal.SIGINT)
    code = wait(aws.clients, job, interval=INTERVAL)
    assert signal.getsignal(signal.SIGINT) is previous
    return code


@pytest.mark.parametrize("typed", [None, "d\n", "D \n", "", "^C\n"], ids=["no terminal", "d", "D", "end", "twice"])
def test_ctrl_c_detaches(
    aws: Aws, job: str, typed: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pressed(aws, job, typed, monkeypatch) == 130
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"detached, the job keeps running; {REATTACH.format(job)}"
    assert (monitor.QUESTION in err) == (typed is not None)
    assert not [name for name, _ in aws.calls if name == "StopTrainingJob"]


def test_ctrl_c_continues(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pressed(aws, job, "\nwhat\n", monkeypatch, no_change, press) == 0
    assert capsys.readouterr().err.count(monitor.QUESTION) == 2


def test_ctrl_c_stops_the_job_and_waits_for_its_end(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (no_change, no_change, no_change, lambda: aws.log(job, "algo-1", "saved"), aws.ending(job, "Stopped"))
    assert pressed(aws, job, "s\n", monkeypatch, *steps) == 143
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"stopping {job}: it saves a checkpoint within 120 seconds;")
    assert lines[2].endswith("  Stopping  Stopping the training job")
    assert lines[3] == "[algo-1] saved"
    assert lines[-2].startswith(f"{job}: Stopped (")


def test_a_failed_stop_is_reported(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.before("StopTrainingJob", network_down)
    assert pressed(aws, job, "s\n", monkeypatch, no_change) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("error: no response from AWS (Could not connect")


def test_two_interrupts_leave_a_call(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        press()
        press()
        raise AssertionError("not reached")

    aws.before("DescribeTrainingJob", in_sequence(no_change, twice))
    assert wait(aws.clients, job, interval=INTERVAL) == 130
    assert capsys.readouterr().out.splitlines()[-1].startswith("detached, the job keeps running; ")
