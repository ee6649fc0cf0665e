"""A job that is watched: what becomes of it, an AWS that does not answer, and Ctrl-C."""

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import job_status
import monitor
from monitor import wait

from tests.cloud.aws import CLOCK, Aws, away, nothing, one_by_one, refusal
from tests.launching import environment
from titanlike.config import UserError

ROOT = Path(__file__).parents[2]
SOON = 0.01
BACK = "back to it: python sagemaker/launch.py wait {} --region us-east-1"


@pytest.fixture
def job(aws: Aws) -> str:
    return aws.running()


def test_wait_says_each_change_once(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    job = aws.send()
    steps = [("Starting", "Preparing"), ("Starting", "No capacity"), ("Downloading", "Image"), ("Training", "")]

    def become(number: int) -> Callable[[], None]:
        history = [{"Status": s, "StatusMessage": m, "StartTime": CLOCK} for s, m in [steps[1], *steps[2 : number + 1]]]
        history = history if number else [{"Status": "Starting", "StatusMessage": "Preparing", "StartTime": CLOCK}]
        return lambda: aws.set(job, "InProgress", steps[number][0], secondary_status_transitions=history)

    states = [become(0), become(0), become(1), become(3)]  # two changes between two looks
    aws.before("DescribeTrainingJob", one_by_one(*states, aws.ending(job, secondary_status_transitions=[])))
    assert wait(aws.clients, job, interval=SOON) == 0
    when = f"{CLOCK.astimezone():%H:%M:%S}"
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        f"{when}  Starting  Preparing",
        f"{when}  Starting  No capacity",
        f"{when}  Downloading  Image",
        f"{when}  Training",
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
    end = CLOCK + timedelta(hours=2)
    more = {"training_start_time": CLOCK, "training_end_time": end, "billable_time_in_seconds": 3600}
    aws.before(
        "DescribeTrainingJob",
        one_by_one(nothing, lambda: aws.set(job, status, secondary, failure_reason=reason or None, **more)),
    )
    assert wait(aws.clients, job, interval=SOON) == code
    lines = capsys.readouterr().out.splitlines()
    again = f"to go on from its newest checkpoint: python sagemaker/launch.py resume {job} --region us-east-1"
    assert lines[2:] == [
        f"{job}: {secondary} (2:00:00, $126.60)" + (f": {reason}" if reason else ""),
        *([again] if code else []),
    ]


def test_a_network_that_is_away_is_waited_for(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    rest = monitor.Watch._rest

    def noted(watch: monitor.Watch) -> None:
        pauses.append(watch.pause)
        rest(watch)

    monkeypatch.setattr(monitor.Watch, "_rest", noted)
    monkeypatch.setattr(watching, "LONGEST", 5 * SOON)
    aws.before("DescribeTrainingJob", one_by_one(nothing, *[away] * 4, nothing, away, nothing, aws.ending(job)))
    assert wait(aws.clients, job, interval=SOON) == 0
    lines = capsys.readouterr().out.splitlines()
    told = (
        'AWS does not answer (Could not connect to the endpoint URL: "https://api.sagemaker.us-east-1.amazonaws.com/"): look '
        "whether the network is there, and --region us-east-1 right; it is asked again and again, and the job goes on"
    )
    assert lines[1:5] == [told, "AWS answers again", told, "AWS answers again"]
    assert [round(pause / SOON) for pause in pauses] == [1, 2, 4, 5, 5, 1, 2, 1, 1]


def test_what_waiting_cannot_help_ends_it(aws: Aws, job: str) -> None:
    aws.before("DescribeTrainingJob", one_by_one(nothing, lambda: refusal("ExpiredTokenException", "it has expired")))
    with pytest.raises(UserError) as error:
        wait(aws.clients, job, interval=SOON)
    assert str(error.value) == (
        "AWS does not take your credentials (ExpiredTokenException: it has expired); log in again (aws sso login, or aws "
        f"configure), or set AWS_PROFILE; the job itself goes on, and {BACK.format(job)}"
    )
    with pytest.raises(UserError, match=r"titanlike-none: there is no such job in us-east-1$"):
        wait(aws.clients, "titanlike-none", interval=SOON)


def test_without_a_terminal_it_is_not_silent_for_long(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "QUIET", 0.0)
    monkeypatch.setattr(job_status, "now", lambda: CLOCK + timedelta(hours=1))
    aws.set(job, "InProgress", "Training", training_start_time=CLOCK)
    aws.before("DescribeTrainingJob", one_by_one(nothing, nothing, aws.ending(job)))
    assert wait(aws.clients, job, interval=SOON) == 0
    assert re.search(r"\nTraining for 0:00:\d\d  2 x ml\.p5\.48xlarge  \$126\.60 so far\n", capsys.readouterr().out)


# Ctrl-C.


class Terminal:
    """Somebody types."""

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
    """Ctrl-C at the second look, and what is typed at the question; then these steps, then the end."""
    monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
    aws.before("DescribeTrainingJob", one_by_one(nothing, press, *steps, aws.ending(job)))
    before = signal.getsignal(signal.SIGINT)
    code = wait(aws.clients, job, interval=SOON)
    assert signal.getsignal(signal.SIGINT) is before
    return code


@pytest.mark.parametrize("typed", [None, "d\n", "D \n", "", "^C\n"], ids=["no terminal", "d", "D", "end", "twice"])
def test_ctrl_c_detaches(
    aws: Aws, job: str, typed: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pressed(aws, job, typed, monkeypatch) == 130
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"detached, and the job goes on; {BACK.format(job)}"
    assert (monitor.QUESTION in err) == (typed is not None)
    assert not [name for name, _ in aws.asked if name == "StopTrainingJob"]


def test_ctrl_c_goes_on(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pressed(aws, job, "\nwhat\n", monkeypatch, nothing, press) == 0
    assert capsys.readouterr().err.count(monitor.QUESTION) == 2


def test_ctrl_c_stops_the_job_and_waits_for_that(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (nothing, nothing, nothing, lambda: aws.say(job, "algo-1", "saved"), aws.ending(job, "Stopped"))
    assert pressed(aws, job, "s\n", monkeypatch, *steps) == 143
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"{job} is told to stop: it saves, within 120 seconds;")
    assert lines[2].endswith("  Stopping  Stopping the training job")
    assert lines[3] == "[algo-1] saved"
    assert lines[-2].startswith(f"{job}: Stopped (")


def test_a_stop_that_fails_is_told(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.before("StopTrainingJob", away)
    assert pressed(aws, job, "s\n", monkeypatch, nothing) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("error: AWS does not answer (Could not connect")


def test_two_at_once_get_out_of_a_call(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        press()
        press()
        raise AssertionError("not reached")

    aws.before("DescribeTrainingJob", one_by_one(nothing, twice))
    assert wait(aws.clients, job, interval=SOON) == 130
    assert capsys.readouterr().out.splitlines()[-1].startswith("detached, and the job goes on; ")


def test_on_a_terminal(aws: Aws, job: str) -> None:
    """The real thing: colours, a live line, and Ctrl-C that asks."""
    aws.say(job, "algo-1", "one")
    aws.say(job, "algo-2", "two")
    aws.say(job, "algo-1", "three", ago=10)
    code = "import sys, service, watching; sys.exit(monitor.wait(service.clients(), sys.argv[1], interval=0.1))"
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'sagemaker'}", TERM="xterm-256color", COLUMNS="100", LINES="30")
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, job],
        env=variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = ""

    def until(words: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + 30
        while words not in shown:
            assert select.select([ours], [], [], deadline - time.monotonic())[0], shown
            shown += os.read(ours, 10_000).decode()

    try:
        until("so far  Ctrl-C detaches or stops")
        assert "Training for 0:00:" in shown
        assert all(f"{colour}[algo-{n}] " in shown for n, colour in ((1, "\x1b[36m"), (2, "\x1b[32m")))
        assert shown.count("\x1b[36m[algo-1]") == 2
        process.send_signal(signal.SIGINT)
        until(monitor.QUESTION)
        os.write(ours, b"s\n")
        until("is told to stop")
        aws.set(job, "Stopped")
        until("to go on from its newest checkpoint")
        assert process.wait(timeout=30) == 143
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    finally:
        process.kill()
        process.wait()
        os.close(ours)
