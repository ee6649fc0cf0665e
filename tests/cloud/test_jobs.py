"""Jobs that were sent: found, listed, described, stopped and gone on with."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import jobs
import pytest
import job_status
from jobs import run, list_jobs, table
from instances import INSTANCE_TYPES, PRICE_SOURCE
from request import Channel
from job_status import active_job, find_job, job_names, newest_job, resume_request

from tests.cloud.aws import BUCKET, CLOCK, Answer, Aws, refusal
from tests.launching import environment
from titanlike.config import UserError

ROOT = Path(__file__).parents[2]
HOUR = timedelta(hours=1)
NOW = CLOCK + 24 * HOUR


@pytest.fixture(autouse=True)
def same_clients(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take those of the session, which are there already. And the time stands still."""
    monkeypatch.setattr(job_status, "now", lambda: NOW)
    monkeypatch.setattr(jobs, "make_clients", lambda region: aws.clients)
    monkeypatch.setattr(jobs.system, "exit_on_interrupt", lambda: None)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(words) == 0
    return capsys.readouterr().out


def over(aws: Aws, job: str, hours: float, status: str = "Completed", **more: Any) -> None:
    """The job has ended, after so many hours."""
    aws.set(job, status, training_start_time=CLOCK, training_end_time=CLOCK + hours * HOUR, **more)


def test_a_list_is_of_ours_newest_first(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    ours = [aws.send(run) for run in ("one", "two", "three")]
    aws.send("other", prefix="titan")
    over(aws, ours[0], 1.0, billable_time_in_seconds=3600)
    aws.set(ours[1], "InProgress", "Starting", training_start_time=None)
    aws.set(ours[2], "InProgress", "Training", training_start_time=NOW - HOUR)
    assert [job.name for job in list_jobs(aws.clients)] == ours[::-1]
    lines = shown(capsys, "list").splitlines()
    rows = [[word.strip() for word in line.split("  ") if word] for line in lines[:4]]
    when = f"{CLOCK.astimezone():%Y-%m-%d %H:%M}"
    assert rows[0] == ["job", "status", "machines", "started", "lasted", "cost"]
    assert [rows[1][i] for i in (0, 1, 5)] == [ours[2], "InProgress: Training", "$126.60 so far"]  # 2 x 63.30
    assert rows[2] == [ours[1], "InProgress: Starting", "2 x ml.p5.48xlarge", "not yet", "$0.00 so far"]
    assert rows[3] == [ours[0], "Completed", "2 x ml.p5.48xlarge", when, "1:00:00", "$126.60"]
    assert lines[4:] == ["", f"prices: {PRICE_SOURCE}"]
    asked = [words for name, words in aws.asked if name == "ListTrainingJobs"]
    assert {words["SortOrder"] for words in asked} == {"Descending"}
    assert len(shown(capsys, "list", "--limit", "2").splitlines()) == 5
    assert ours[0] not in shown(capsys, "list", "--prefix", "titan")
    assert shown(capsys, "list", "--prefix", "mine") == "no job in us-east-1 has a name that begins with mine-\n"


def test_all_pages_are_read_until_there_are_enough(aws: Aws) -> None:
    def page() -> tuple[Answer, dict[str, Any]]:
        asked = [words for name, words in aws.asked if name == "ListTrainingJobs"]
        number = len(asked)
        assert asked[-1].get("NextToken") == (f"{number - 1}" if number > 1 else None)
        ours = [{"TrainingJobName": f"titanlike-{number}-{i}", "CreationTime": CLOCK - number * HOUR} for i in range(3)]
        others = [{"TrainingJobName": "not-titanlike-1", "CreationTime": CLOCK}]
        more = {"NextToken": f"{number}"} if number < 4 else {}
        return Answer(200), {"TrainingJobSummaries": [*others, *ours], **more}

    aws.before("ListTrainingJobs", page)
    assert job_names(aws.clients, "titanlike", 4) == [f"titanlike-{n}" for n in ("1-0", "1-1", "1-2", "2-0")]
    assert len(aws.asked) == 2  # pages, and no more
    aws.asked.clear()
    assert len(job_names(aws.clients, "titanlike")) == 12


@pytest.mark.parametrize(
    ("changes", "state", "cost"),
    [
        ({}, {"billable_time_in_seconds": 1800}, "$63.30"),
        ({}, {}, "$253.20"),  # two hours of two machines, where the service does not say what it bills
        ({"spot": True}, {}, "at most $253.20"),
        ({"spot": True}, {"billable_time_in_seconds": 1800}, "$63.30"),
        ({"training_plan": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p"}, {}, "prepaid"),
        ({"instance_type": INSTANCE_TYPES["ml.p5en.48xlarge"]}, {}, ""),
    ],
)
def test_cost(aws: Aws, changes: dict[str, Any], state: dict[str, Any], cost: str) -> None:
    over(aws, aws.send(**changes), 2.0, **state)
    [job] = list_jobs(aws.clients)
    assert job.cost() == cost
    assert ("prices: " in table([job], "titanlike", "us-east-1")) == ("$" in cost)


def test_a_running_job_costs_what_it_has_cost_until_now(aws: Aws) -> None:
    job = aws.send(spot=True)
    aws.set(job, "InProgress", "Training", training_start_time=NOW - 2 * HOUR, billable_time_in_seconds=1)
    assert list_jobs(aws.clients)[0].cost() == "at most $253.20 so far"


def test_a_description_has_what_a_person_wants(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    job = aws.send("my.run", spot=True)
    steps = [
        {"Status": "Starting", "StartTime": CLOCK, "EndTime": CLOCK + HOUR, "StatusMessage": "Preparing the instances"},
        {"Status": "Failed", "StartTime": CLOCK + HOUR, "StatusMessage": "Training job failed"},
    ]
    metrics = [{"MetricName": "loss", "Value": 2.53125, "Timestamp": CLOCK}]
    over(
        aws, job, 1.0, "Failed", failure_reason="AlgorithmError: algo-2: out of memory", billable_time_in_seconds=1260,
        training_time_in_seconds=3600, secondary_status_transitions=steps, final_metric_data_list=metrics, creation_time=CLOCK,
    )  # fmt: skip
    here, there = CLOCK.astimezone(), (CLOCK + HOUR).astimezone()
    assert shown(capsys, "describe", job) == (
        f"{job}\n"
        "  status       Failed\n"
        "  reason       AlgorithmError: algo-2: out of memory\n"
        "  run          my.run\n"
        "  machines     2 x ml.p5.48xlarge, spot, us-east-1\n"
        f"  created      {here:%Y-%m-%d %H:%M:%S}\n"
        "  lasted       1:00:00\n"
        "  billed       1,260 seconds of each machine, 65% saved by spot\n"
        f"  cost         $44.31 ({PRICE_SOURCE})\n"
        f"  code         s3://a-bucket/titanlike/code/{job}\n"
        "  checkpoints  s3://a-bucket/titanlike/checkpoints/my.run\n"
        "  run folder   s3://a-bucket/titanlike/runs/my.run\n"
        f"  output       s3://a-bucket/titanlike/output/{job}\n"
        f"  logs         /aws/sagemaker/TrainingJobs, {job}/\n"
        "\n"
        "history\n"
        f"  {here:%m-%d %H:%M:%S}  Starting                 1:00:00  Preparing the instances\n"
        f"  {there:%m-%d %H:%M:%S}  Failed                            Training job failed\n"
        "\n"
        "last metrics\n"
        "  loss                2.53125\n"
    )
    answer = json.loads(shown(capsys, "describe", "my.run", "--json"))
    assert (answer["TrainingJobName"], answer["StoppingCondition"]["MaxRuntimeInSeconds"]) == (job, 86400)
    assert "ResponseMetadata" not in answer


def test_checkpoints_on_fsx_are_named_where_they_are(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Channel("checkpoints", "fsx://fs-0123456789/mount/kept", writable=True)
    job = aws.send(checkpoints=kept, subnets=("subnet-1",), security_groups=("sg-1",))
    assert "  checkpoints  fsx://fs-0123456789/mount/kept/debug\n" in shown(capsys, "describe", job)


def test_a_run_has_its_own_jobs_alone(aws: Aws) -> None:
    first, dotted, longer, later = [aws.send(run) for run in ("a-b", "a.b", "a-b-c", "a-b")]
    aws.set(first, "InProgress", "Training")
    aws.set(longer, "InProgress", "Training")
    assert newest_job(aws.clients, "a") is None
    assert "DescribeTrainingJob" not in [name for name, _ in aws.asked]  # their names suffice
    found = {run: newest_job(aws.clients, run) for run in ("a-b", "a.b", "a-b-c", "b")}
    assert {run: job.name for run, job in found.items() if job} == {"a-b": later, "a.b": dotted, "a-b-c": longer}
    busy = {run: running(aws.clients, run) for run in ("a-b", "a.b", "a-b-c")}
    assert {run: job.name for run, job in busy.items() if job} == {"a-b": first, "a-b-c": longer}
    aws.set(first, "Stopping")
    assert (job := running(aws.clients, "a-b")) and job.name == first
    aws.set(first, "Stopped")
    assert running(aws.clients, "a-b") is None
    assert newest_job(aws.clients, "a-b", "other") is None


def test_a_name_that_is_none_gets_the_nearest(aws: Aws) -> None:
    def said(name: str, prefix: str = "titanlike") -> str:
        with pytest.raises(UserError) as error:
            find_job(aws.clients, name, prefix)
        return str(error.value)

    assert said("debug") == (
        "debug: no job in us-east-1 has a name that begins with titanlike-; see --region and --prefix"
    )
    job = aws.send("llama.8b")
    none = "there is no such job or run in us-east-1"
    assert said("lama.8b") == f"lama.8b: {none}; did you mean llama.8b?"
    assert said("titanlike-lama-8b-20261001-100000").endswith(f"{none}; did you mean {job}?")
    assert said("x") == f"x: {none}; `python sagemaker/launch.py list` shows those that there are"
    assert said("not a name").startswith(f"not a name: {none}")
    assert find_job(aws.clients, "llama.8b").name == find_job(aws.clients, job).name == job
    assert find_job(aws.clients, job, "other").name == job


def test_resume_is_the_same_request_again_and_again(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    job = aws.send(spot=True, environment={"NAME": "value"})
    aws.set(job, "Stopped")
    first = json.loads(shown(capsys, "resume", "debug", "--dry-run"))
    assert first["TrainingJobName"].startswith("titanlike-debug-20")
    assert first["TrainingJobName"] != job
    assert first["Environment"] == {
        "NCCL_DEBUG": "WARN",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "NAME": "value",
    }
    assert len(job_names(aws.clients, "titanlike")) == 1
    out = shown(capsys, "resume", job)
    [second, _] = job_names(aws.clients, "titanlike")
    assert out == (f"sent {second}\nto watch it: python sagemaker/launch.py wait {second} --region us-east-1\n")
    aws.set(second, "Failed")
    # Its request lies with its code, and that with the first job.
    third = resume_request(aws.clients, "debug", "20270101-000000")
    assert third == {**first, "TrainingJobName": "titanlike-debug-20270101-000000"}
    other = resume_request(aws.clients, second, "20270101-000000", "other")
    assert other == third


def test_what_cannot_be_resumed(aws: Aws) -> None:
    def said(name: str) -> str:
        with pytest.raises(UserError) as error:
            resume_request(aws.clients, name, "20270101-000000")
        return str(error.value)

    old, new = aws.send(), aws.send()
    aws.set(old, "InProgress", "Training")
    aws.set(new, "Stopped")
    assert said(new) == (
        f"debug is still trained by {old} (Training): python sagemaker/launch.py wait {old} --region us-east-1"
    )
    aws.set(old, "Completed")
    assert said(old) == (
        f"debug is done: {old} has completed; to train longer, send the recipe again, with --run debug and more steps"
    )
    aws.clients.s3.delete_object(Bucket=BUCKET, Key=f"titanlike/code/{new}/request.json")
    assert said("debug") == (
        f"s3://a-bucket/titanlike/code/{new}/request.json is not there any more; send the recipe again, with --run debug, and "
        "it goes on all the same"
    )
    aws.set(new, "Stopped", checkpoint_config=None)
    assert said(new) == f"{new}: `launch.py` has not sent this job, and cannot go on with it"
    assert said("debg").endswith("did you mean debug?")


def test_stop(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    job = aws.send()
    with pytest.raises(UserError, match=f"{job}: there is nothing to stop, it is Completed"):
        run(["stop", "debug"])
    aws.set(job, "InProgress", "Training")
    assert shown(capsys, "stop", job) == (
        f"{job} is told to stop: it saves, within 120 seconds; to go on from there: python sagemaker/launch.py resume {job} "
        "--region us-east-1\n"
    )
    assert find_job(aws.clients, job).status == "Stopping"
    assert shown(capsys, "stop", job) == f"{job} is being stopped already\n"
    assert [name for name, _ in aws.asked].count("StopTrainingJob") == 1
    aws.set(job, "InProgress", "Training")
    aws.before("StopTrainingJob", lambda: refusal("AccessDeniedException", "User: x may not"))
    with pytest.raises(UserError, match=r"your credentials may not do this \(StopTrainingJob: User: x may not\)"):
        run(["stop", job])


def test_help_and_bad_words_ask_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import jobs, sys; jobs.build_parser(); assert not {'boto3', 'botocore', 'torch', 'rich'} & sys.modules.keys()"
    )
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'sagemaker'}")
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    for words in (["list", "--limit", "0"], ["logs", "x", "--tail", "-1"], ["describe"], ["other"]):
        with pytest.raises(SystemExit, match="2"):
            run(words)
    assert "--limit: 0 is not a whole number from 1 on" in capsys.readouterr().err
