"""Lines of all hosts of a job: in order, none lost, none twice, and text only."""

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

from tests.cloud.aws import CLOCK, Answer, Aws, nothing, one_by_one, refusal
from tests.launching import environment
from titanlike.config import UserError

ROOT = Path(__file__).parents[2]
SOON = 0.01


@pytest.fixture
def job(aws: Aws) -> str:
    return aws.running()


def test_lines_of_all_hosts_by_time(aws: Aws, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    aws.say(job, "algo-1", "first", "third", "fifth", ago=60)
    aws.say(job, "algo-2", "second", "fourth", ago=59.5)
    aws.say(job, "algo-1", "after a restart", ago=50, number=2)
    aws.say(f"{job}0", "algo-1", "another job's")
    show_logs(aws.clients, job)
    assert capsys.readouterr().out == (
        "[algo-1] first\n[algo-2] second\n[algo-1] third\n[algo-2] fourth\n[algo-1] fifth\n[algo-1] after a restart\n"
    )


@pytest.mark.parametrize("tail", [1, 2, 3, 100])
def test_a_tail_is_of_all_hosts_together(aws: Aws, job: str, tail: int, capsys: pytest.CaptureFixture[str]) -> None:
    aws.say(job, "algo-1", *"abc", ago=60)
    aws.say(job, "algo-2", *"ABC", ago=30)
    aws.set(job, "Completed")
    show_logs(aws.clients, job, tail=tail, follow=True, interval=SOON)
    lines = [f"[algo-1] {letter}" for letter in "abc"] + [f"[algo-2] {letter}" for letter in "ABC"]
    assert capsys.readouterr().out.splitlines() == lines[-tail:]


def test_all_pages_of_a_stream_are_read(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An empty page is not the end: that is the same token again.
    pages = {None: ["a", "b"], "1": [], "2": ["c"], "3": []}
    follows = {None: "1", "1": "2", "2": "3", "3": "3"}
    before = {None: "1", "1": "2", "2": "3", "3": "3"}

    def answer() -> tuple[Answer, dict[str, Any]]:
        asked = [words for name, words in aws.asked if name == "GetLogEvents"][-1]
        token = asked.get("nextToken")
        events = [{"timestamp": ord(message), "message": message} for message in pages[token]]
        tokens = {"nextForwardToken": follows[token], "nextBackwardToken": before[token]}
        return Answer(200), {"events": events, **tokens}

    aws.say(job, "algo-1", "x")
    aws.before("GetLogEvents", answer)
    show_logs(aws.clients, job)
    assert capsys.readouterr().out.split() == ["[algo-1]", "a", "[algo-1]", "b", "[algo-1]", "c"]
    assert all(words["startFromHead"] for name, words in aws.asked if name == "GetLogEvents")
    # From the end backward, where what comes later lies before.
    pages |= {None: ["c"], "2": ["a", "b"]}
    stream = logs.Stream(aws.clients.logs, f"{job}/algo-1-1234567890")
    stream.fetch_last(3)
    assert [message for _, message in stream.lines] == ["a", "b", "c"]


def test_all_streams_are_found(aws: Aws, job: str) -> None:
    def answer() -> tuple[Answer, dict[str, Any]]:  # AWS names 50 at a time
        asked = [words for name, words in aws.asked if name == "DescribeLogStreams"][-1]
        begin = int(asked.get("nextToken", "0"))
        found = [{"logStreamName": f"{job}/algo-{number}-1"} for number in range(begin, begin + 50)]
        return Answer(200), {"logStreams": found, **({"nextToken": str(begin + 50)} if begin < 100 else {})}

    aws.before("DescribeLogStreams", answer)
    aws.before("GetLogEvents", lambda: (Answer(200), {"events": [], "nextForwardToken": "x"}))
    read = logs.Logs(aws.clients, job)
    assert list(read.read()) == []
    assert {stream.host for stream in read.streams.values()} == {f"algo-{number}" for number in range(150)}


def test_a_line_is_text_and_no_more(aws: Aws, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    aws.say(job, "algo-1", "\x1b[31mred\x1b[0m\x1b[2J\x07", "\r 1%\r 50%\r\n", "  tab\tstays  ", "\n")
    show_logs(aws.clients, job)
    assert capsys.readouterr().out.splitlines() == [
        f"[algo-1] {text}" for text in ("red", " 1%", " 50%", "  tab\tstays", "")
    ]


def test_no_lines_are_told(aws: Aws, job: str) -> None:
    for _ in range(2):
        with pytest.raises(UserError) as error:
            show_logs(aws.clients, job)
        assert str(error.value) == (
            f"{job}: there is no line of it in CloudWatch, in /aws/sagemaker/TrainingJobs of us-east-1; it is Training"
        )
        aws.say(f"{job}0", "algo-1", "another job's")  # now there is the group


def test_nothing_is_lost_when_aws_fails_in_between(aws: Aws, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    aws.say(job, "algo-1", "a", "c", ago=60)
    aws.say(job, "algo-2", "b", "d", ago=59.5)
    throttled = functools.partial(refusal, "ThrottlingException", "Rate exceeded")
    # One page of each host, and then nothing for the second page of the first.
    aws.before("GetLogEvents", one_by_one(nothing, throttled, nothing, throttled, throttled))
    aws.before("DescribeTrainingJob", one_by_one(nothing, nothing, aws.ending(job)))
    show_logs(aws.clients, job, follow=True, interval=SOON)
    assert capsys.readouterr().out.splitlines() == [
        "AWS is asked too often just now (GetLogEvents: ThrottlingException): try again in a minute; it is asked again and again, "
        "and the job goes on",
        "[algo-1] a",
        "[algo-2] b",
        "[algo-1] c",
        "[algo-2] d",
        "AWS answers again",
    ]


def test_follow_ends_with_the_job_and_its_late_lines(aws: Aws, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    aws.before("DescribeTrainingJob", one_by_one(nothing, nothing, aws.ending(job)))
    say = [lambda n=n: aws.say(job, f"algo-{n % 2 + 1}", f"line {n}", ago=60 - n) for n in range(6)]
    aws.before("DescribeLogStreams", one_by_one(*say))
    show_logs(aws.clients, job, follow=True, interval=SOON)
    assert capsys.readouterr().out.splitlines() == [f"[algo-{n % 2 + 1}] line {n}" for n in range(6)]
    assert [name for name, _ in aws.asked].count("DescribeTrainingJob") == 3


def test_commands_about_lines(
    aws: Aws, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "make_clients", lambda region: aws.clients)
    monkeypatch.setattr(jobs.system, "exit_on_interrupt", nothing)
    aws.say(job, "algo-1", "a", "b")
    assert run(["logs", "debug", "--tail", "1"]) == 0
    assert capsys.readouterr().out == "[algo-1] b\n"
    long_ago = CLOCK - timedelta(days=1)
    aws.set(job, "Failed", training_start_time=long_ago, training_end_time=long_ago)
    monkeypatch.setattr("monitor.time.sleep", lambda seconds: pytest.fail("what has ended long ago has no late lines"))
    assert run(["logs", "debug", "--follow"]) == 0
    assert run(["wait", "debug", "--tail", "1"]) == 1
    out = capsys.readouterr().out
    assert (out.count("[algo-1] a\n"), out.count("[algo-1] b\n")) == (1, 2)
    with pytest.raises(UserError, match="did you mean debug"):
        run(["wait", "debgu"])


@pytest.mark.parametrize("words", [["logs", "debug"], ["list"]])
def test_a_reader_that_has_seen_enough(aws: Aws, job: str, words: list[str]) -> None:
    aws.say(job, "algo-1", *"abc")
    reads, writes = os.pipe()
    os.close(reads)
    code = "import sys; from jobs import run; sys.exit(command(sys.argv[1:]))"
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'sagemaker'}", PYTHONUNBUFFERED="")
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=variables,
        stdout=writes,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")
