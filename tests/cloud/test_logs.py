"""Log lines of all hosts of a job: ordered, complete, without duplicates or control characters."""

import functools
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import jobs
import logs
import pytest
from jobs import run
from monitor import show_logs

from tests.cloud.aws import START, Aws, FakeResponse, error_response, in_sequence, no_change
from tests.launching import environment
from titanlike.config import UserError

ROOT = Path(__file__).parents[2]
INTERVAL = 0.01


@pytest.fixture
def job(aws: Aws) -> str:
    return aws.running()


def test_lines_of_all_hosts_are_ordered_by_time(aws: Aws, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    aws.log(job, "algo-1", "first", "third", "fifth", ago=60)
    aws.log(job, "algo-2", "second", "fourth", ago=59.5)
    aws.log(job, "algo-1", "after a restart", ago=50, number=2)
    aws.log(f"{job}0", "algo-1", "another job's")
    show_logs(aws.clients, job)
    assert capsys.readouterr().out == (
        "[algo-1] first\n[algo-2] second\n[algo-1] third\n[algo-2] fourth\n[algo-1] fifth\n[algo-1] after a restart\n"
    )


@pytest.mark.parametrize("tail", [1, 2, 3, 100])
def test_tail_counts_lines_of_all_hosts(aws: Aws, job: str, tail: int, capsys: pytest.CaptureFixture[str]) -> None:
    aws.log(job, "algo-1", *"abc", ago=60)
    aws.log(job, "algo-2", *"ABC", ago=30)
    aws.set_status(job, "Completed")
    show_logs(aws.clients, job, tail=tail, follow=True, interval=INTERVAL)
    lines = [f"[algo-1] {letter}" for letter in "abc"] + [f"[algo-2] {letter}" for letter in "ABC"]
    assert capsys.readouterr().out.splitlines() == lines[-tail:]


def test_all_pages_of_a_stream_are_read(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An empty page is not the end of the stream, a repeated token is.
    pages = {None: ["a", "b"], "1": [], "2": ["c"], "3": []}
    follows = {None: "1", "1": "2", "2": "3", "3": "3"}
    before = {None: "1", "1": "2", "2": "3", "3": "3"}

    def respond() -> tuple[FakeResponse, dict[str, Any]]:
        parameters = [parameters for name, parameters in aws.calls if name == "GetLogEvents"][-1]
        token = parameters.get("nextToken")
        events = [{"timestamp": ord(message), "message": message} for message in pages[token]]
        tokens = {"nextForwardToken": follows[token], "nextBackwardToken": before[token]}
        return FakeResponse(200), {"events": events, **tokens}

    aws.log(job, "algo-1", "x")
    aws.before("GetLogEvents", respond)
    show_logs(aws.clients, job)
    assert capsys.readouterr().out.split() == ["[algo-1]", "a", "[algo-1]", "b", "[algo-1]", "c"]
    assert all(parameters["startFromHead"] for name, parameters in aws.calls if name == "GetLogEvents")
    # Backward from the end.
    pages |= {None: ["c"], "2": ["a", "b"]}
    stream = logs.Stream(aws.clients.logs, f"{job}/algo-1-1234567890")
    stream.fetch_last(3)
    assert [message for _, message in stream.events] == ["a", "b", "c"]


def test_all_streams_are_found(aws: Aws, job: str) -> None:
    def respond() -> tuple[FakeResponse, dict[str, Any]]:  # AWS returns pages of 50
        parameters = [parameters for name, parameters in aws.calls if name == "DescribeLogStreams"][-1]
        begin = int(parameters.get("nextToken", "0"))
        found = [{"logStreamName": f"{job}/algo-{number}-1"} for number in range(begin, begin + 50)]
        return FakeResponse(200), {"logStreams": found, **({"nextToken": str(begin + 50)} if begin < 100 else {})}

    aws.before("DescribeLogStreams", respond)
    aws.before("GetLogEvents", lambda: (FakeResponse(200), {"events": [], "nextForwardToken": "x"}))
    read = logs.Logs(aws.clients, job)
    assert list(read.read()) == []
    assert {stream.host for stream in read.streams.values()} == {f"algo-{number}" for number in range(150)}


def test_control_characters_are_removed(aws: Aws, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    aws.log(job, "algo-1", "\x1b[31mred\x1b[0m\x1b[2J\x07", "\r 1%\r 50%\r\n", "  tab\tstays  ", "\n")
    show_logs(aws.clients, job)
    assert capsys.readouterr().out.splitlines() == [
        f"[algo-1] {text}" for text in ("red", " 1%", " 50%", "  tab\tstays", "")
    ]


def test_missing_lines_are_reported(aws: Aws, job: str) -> None:
    for _ in range(2):
        with pytest.raises(UserError) as error:
            show_logs(aws.clients, job)
        assert str(error.value) == (
            f"{job}: no log lines in CloudWatch group /aws/sagemaker/TrainingJobs of us-east-1; its status is Training"
        )
        aws.log(f"{job}0", "algo-1", "another job's")  # creates the log group


def test_no_line_is_lost_after_an_error(aws: Aws, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    aws.log(job, "algo-1", "a", "c", ago=60)
    aws.log(job, "algo-2", "b", "d", ago=59.5)
    throttled = functools.partial(error_response, "ThrottlingException", "Rate exceeded")
    # The first page of the second host fails, later the second page of the first host.
    aws.before("GetLogEvents", in_sequence(no_change, throttled, no_change, throttled, throttled))
    aws.before("DescribeTrainingJob", in_sequence(no_change, no_change, aws.ending(job)))
    show_logs(aws.clients, job, follow=True, interval=INTERVAL)
    assert capsys.readouterr().out.splitlines() == [
        "AWS throttles requests (GetLogEvents: ThrottlingException); try again in a minute; retrying, the job keeps running",
        "[algo-1] a",
        "[algo-2] b",
        "[algo-1] c",
        "[algo-2] d",
        "AWS responds again",
    ]


def test_follow_ends_after_the_late_lines_of_the_job(aws: Aws, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    aws.before("DescribeTrainingJob", in_sequence(no_change, no_change, aws.ending(job)))
    writes = [lambda n=n: aws.log(job, f"algo-{n % 2 + 1}", f"line {n}", ago=60 - n) for n in range(6)]
    aws.before("DescribeLogStreams", in_sequence(*writes))
    show_logs(aws.clients, job, follow=True, interval=INTERVAL)
    assert capsys.readouterr().out.splitlines() == [f"[algo-{n % 2 + 1}] line {n}" for n in range(6)]
    assert [name for name, _ in aws.calls].count("DescribeTrainingJob") == 3


def test_log_commands(aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jobs, "make_clients", lambda region: aws.clients)
    monkeypatch.setattr(jobs.system, "exit_on_interrupt", no_change)
    aws.log(job, "algo-1", "a", "b")
    assert run(["logs", "debug", "--tail", "1"]) == 0
    assert capsys.readouterr().out == "[algo-1] b\n"
    long_ago = START - timedelta(days=1)
    aws.set_status(job, "Failed", training_start_time=long_ago, training_end_time=long_ago)
    monkeypatch.setattr(
        "monitor.time.sleep", lambda seconds: pytest.fail("a job that ended long ago has no late lines")
    )
    assert run(["logs", "debug", "--follow"]) == 0
    assert run(["wait", "debug", "--tail", "1"]) == 1
    out = capsys.readouterr().out
    assert (out.count("[algo-1] a\n"), out.count("[algo-1] b\n")) == (1, 2)
    with pytest.raises(UserError, match="did you mean debug"):
        run(["wait", "debgu"])


@pytest.mark.parametrize("arguments", [["logs", "debug"], ["list"]])
def test_a_closed_pipe_ends_the_command(aws: Aws, job: str, arguments: list[str]) -> None:
    aws.log(job, "algo-1", *"abc")
    reader, writer = os.pipe()
    os.close(reader)
    code = "from launch import main; main()"
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'sagemaker'}", PYTHONUNBUFFERED="")
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=variables,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
