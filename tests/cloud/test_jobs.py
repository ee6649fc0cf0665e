"""Operations on submitted jobs: find, list, describe, stop and resume."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import job_status
import jobs
import pytest
from instances import find_instance_type
from job_status import active_job, find_job, job_names, newest_job, resume_request
from jobs import list_jobs, run, table
from request import Channel, base_name

from tests.cloud.aws import BUCKET, START, Aws, FakeResponse, error_response
from tests.launching import environment
from titanlike.config import UserError

ROOT = Path(__file__).parents[2]
HOUR = timedelta(hours=1)
NOW = START + 24 * HOUR


@pytest.fixture(autouse=True)
def shared_clients(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares the session's clients, and fixes the time."""
    monkeypatch.setattr(job_status, "now", lambda: NOW)
    monkeypatch.setattr(jobs, "make_clients", lambda region: aws.clients)
    monkeypatch.setattr(jobs.system, "exit_on_interrupt", lambda: None)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 0
    return capsys.readouterr().out


def finish(aws: Aws, job: str, hours: float, status: str = "Completed", **more: Any) -> None:
    """Ends a job after a number of hours."""
    aws.set_status(job, status, training_start_time=START, training_end_time=START + hours * HOUR, **more)


def test_list_has_jobs_of_the_prefix_newest_first(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    names = [aws.submit(run) for run in ("one", "two", "three")]
    aws.submit("other", prefix="titan")
    finish(aws, names[0], 1.0, billable_time_in_seconds=3600)
    aws.set_status(names[1], "InProgress", "Starting", training_start_time=None)
    aws.set_status(names[2], "InProgress", "Training", training_start_time=NOW - HOUR)
    assert [job.name for job in list_jobs(aws.clients)] == names[::-1]
    lines = output(capsys, "list").splitlines()
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[:4]]
    start = f"{START.astimezone():%Y-%m-%d %H:%M}"
    assert rows[0] == ["job", "status", "instances", "started", "duration", "cost"]
    assert [rows[1][i] for i in (0, 1, 5)] == [names[2], "InProgress: Training", "$126.60 so far"]  # 2 x 63.30
    assert rows[2] == [names[1], "InProgress: Starting", "2 x ml.p5.48xlarge", "not yet", "$0.00 so far"]
    assert rows[3] == [names[0], "Completed", "2 x ml.p5.48xlarge", start, "1:00:00", "$126.60"]
    assert lines[4:] == ["", "prices: us-east-1, on-demand, 2026-09, unofficial"]
    calls = [parameters for name, parameters in aws.calls if name == "ListTrainingJobs"]
    assert {parameters["SortOrder"] for parameters in calls} == {"Descending"}
    assert len(output(capsys, "list", "--limit", "2").splitlines()) == 5
    assert names[0] not in output(capsys, "list", "--prefix", "titan")
    assert output(capsys, "list", "--prefix", "other") == "no job in us-east-1 has a name that begins with other-\n"


def test_pages_are_read_up_to_the_limit(aws: Aws) -> None:
    def page() -> tuple[FakeResponse, dict[str, Any]]:
        calls = [parameters for name, parameters in aws.calls if name == "ListTrainingJobs"]
        number = len(calls)
        assert calls[-1].get("NextToken") == (f"{number - 1}" if number > 1 else None)
        matching = [
            {"TrainingJobName": f"titanlike-{number}-{i}", "CreationTime": START - number * HOUR} for i in range(3)
        ]
        others = [{"TrainingJobName": "not-titanlike-1", "CreationTime": START}]
        more = {"NextToken": f"{number}"} if number < 4 else {}
        return FakeResponse(200), {"TrainingJobSummaries": [*others, *matching], **more}

    aws.before("ListTrainingJobs", page)
    assert job_names(aws.clients, "titanlike", 4) == [f"titanlike-{n}" for n in ("1-0", "1-1", "1-2", "2-0")]
    assert len(aws.calls) == 2  # requests
    aws.calls.clear()
    assert len(job_names(aws.clients, "titanlike")) == 12


@pytest.mark.parametrize(
    ("changes", "status", "cost"),
    [
        ({}, {"billable_time_in_seconds": 1800}, "$63.30"),
        ({}, {}, "$253.20"),  # two hours of two instances, without billed seconds
        ({"spot": True}, {}, "at most $253.20"),
        ({"spot": True}, {"billable_time_in_seconds": 1800}, "$63.30"),
        ({"training_plan": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p"}, {}, "prepaid"),
        ({"instance_type": find_instance_type("ml.p5en.48xlarge")}, {}, ""),
    ],
)
def test_cost(aws: Aws, changes: dict[str, Any], status: dict[str, Any], cost: str) -> None:
    finish(aws, aws.submit(**changes), 2.0, **status)
    [job] = list_jobs(aws.clients)
    assert job.cost() == cost
    assert ("prices: " in table([job], "titanlike", "us-east-1")) == ("$" in cost)


def test_cost_of_a_running_job(aws: Aws) -> None:
    job = aws.submit(spot=True)
    aws.set_status(job, "InProgress", "Training", training_start_time=NOW - 2 * HOUR, billable_time_in_seconds=1)
    assert list_jobs(aws.clients)[0].cost() == "at most $253.20 so far"


def test_describe(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    job = aws.submit("my.run", spot=True)
    steps = [
        {"Status": "Starting", "StartTime": START, "EndTime": START + HOUR, "StatusMessage": "Preparing the instances"},
        {"Status": "Failed", "StartTime": START + HOUR, "StatusMessage": "Training job failed"},
    ]
    metrics = [{"MetricName": "loss", "Value": 2.53125, "Timestamp": START}]
    finish(
        aws, job, 1.0, "Failed", failure_reason="AlgorithmError: algo-2: out of memory", billable_time_in_seconds=1260,
        training_time_in_seconds=3600, secondary_status_transitions=steps, final_metric_data_list=metrics, creation_time=START,
    )  # fmt: skip
    start, end = START.astimezone(), (START + HOUR).astimezone()
    assert output(capsys, "describe", job) == (
        f"{job}\n"
        "  status       Failed\n"
        "  reason       AlgorithmError: algo-2: out of memory\n"
        "  run          my.run\n"
        "  instances    2 x ml.p5.48xlarge, spot, us-east-1\n"
        f"  created      {start:%Y-%m-%d %H:%M:%S}\n"
        "  duration     1:00:00\n"
        "  billed       1,260 seconds per instance, 65% saved by spot\n"
        f"  cost         $44.31 (us-east-1, on-demand, 2026-09, unofficial)\n"
        f"  code         s3://a-bucket/titanlike/code/{job}\n"
        "  checkpoints  s3://a-bucket/titanlike/checkpoints/my.run\n"
        "  run folder   s3://a-bucket/titanlike/runs/my.run\n"
        f"  output       s3://a-bucket/titanlike/output/{job}\n"
        f"  logs         /aws/sagemaker/TrainingJobs, {job}/\n"
        "\n"
        "history\n"
        f"  {start:%m-%d %H:%M:%S}  Starting                 1:00:00  Preparing the instances\n"
        f"  {end:%m-%d %H:%M:%S}  Failed                            Training job failed\n"
        "\n"
        "last metrics\n"
        "  loss                2.53125\n"
    )
    description = json.loads(output(capsys, "describe", "my.run", "--json"))
    assert (description["TrainingJobName"], description["StoppingCondition"]["MaxRuntimeInSeconds"]) == (job, 86400)
    assert "ResponseMetadata" not in description


def test_describe_has_the_location_of_checkpoints_on_fsx(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Channel("checkpoints", "fsx://fs-0123456789/mount/checkpoints", writable=True)
    job = aws.submit(checkpoints=checkpoints, subnets=("subnet-1",), security_groups=("sg-1",))
    assert "  checkpoints  fsx://fs-0123456789/mount/checkpoints/debug\n" in output(capsys, "describe", job)


def test_jobs_of_a_run_exclude_jobs_of_similar_names(aws: Aws) -> None:
    first, dotted, longer, later = [aws.submit(run) for run in ("a-b", "a.b", "a-b-c", "a-b")]
    aws.set_status(first, "InProgress", "Training")
    aws.set_status(longer, "InProgress", "Training")
    assert newest_job(aws.clients, "a") is None
    assert "DescribeTrainingJob" not in [name for name, _ in aws.calls]  # the names are enough
    found = {run: newest_job(aws.clients, run) for run in ("a-b", "a.b", "a-b-c", "b")}
    assert {run: job.name for run, job in found.items() if job} == {"a-b": later, "a.b": dotted, "a-b-c": longer}
    active = {run: active_job(aws.clients, run, base_name("titanlike", run)) for run in ("a-b", "a.b", "a-b-c")}
    assert {run: job.name for run, job in active.items() if job} == {"a-b": first, "a-b-c": longer}
    aws.set_status(first, "Stopping")
    assert (job := active_job(aws.clients, "a-b", "titanlike-a-b")) and job.name == first
    aws.set_status(first, "Stopped")
    assert active_job(aws.clients, "a-b", "titanlike-a-b") is None
    assert newest_job(aws.clients, "a-b", "other") is None


def test_unknown_names_get_a_suggestion(aws: Aws) -> None:
    def error_of(name: str, prefix: str = "titanlike") -> str:
        with pytest.raises(UserError) as error:
            find_job(aws.clients, name, prefix)
        return str(error.value)

    assert error_of("debug") == (
        "debug: no job in us-east-1 has a name that begins with titanlike-; check --region and --prefix"
    )
    job = aws.submit("llama.8b")
    none = "no such job or run in us-east-1"
    assert error_of("lama.8b") == f"lama.8b: {none}; did you mean llama.8b?"
    assert error_of("titanlike-lama-8b-20261001-100000").endswith(f"{none}; did you mean {job}?")
    assert error_of("x") == f"x: {none}; run `python sagemaker/launch.py list`"
    assert error_of("not a name").startswith(f"not a name: {none}")
    assert find_job(aws.clients, "llama.8b").name == find_job(aws.clients, job).name == job
    assert find_job(aws.clients, job, "other").name == job


def test_resume_submits_the_original_request(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    job = aws.submit(spot=True, environment={"NAME": "value"})
    aws.set_status(job, "Stopped")
    first = json.loads(output(capsys, "resume", "debug", "--dry-run"))
    assert first["TrainingJobName"].startswith("titanlike-debug-20")
    assert first["TrainingJobName"] != job
    assert first["Environment"] == {
        "NCCL_DEBUG": "WARN",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "NAME": "value",
    }
    assert len(job_names(aws.clients, "titanlike")) == 1
    out = output(capsys, "resume", job)
    [second, _] = job_names(aws.clients, "titanlike")
    assert out == (f"submitted {second}\nto monitor it: python sagemaker/launch.py wait {second} --region us-east-1\n")
    aws.set_status(second, "Failed")
    # A resumed job uses the code of the first job, and the request beside it.
    third = resume_request(aws.clients, "debug", "20270101-000000")
    assert third == {**first, "TrainingJobName": "titanlike-debug-20270101-000000"}
    other = resume_request(aws.clients, second, "20270101-000000", "other")
    assert other == third


def test_resume_errors(aws: Aws) -> None:
    def error_of(name: str) -> str:
        with pytest.raises(UserError) as error:
            resume_request(aws.clients, name, "20270101-000000")
        return str(error.value)

    old, new = aws.submit(), aws.submit()
    aws.set_status(old, "InProgress", "Training")
    aws.set_status(new, "Stopped")
    assert error_of(new) == (
        f"run debug has an active job, {old} (Training): python sagemaker/launch.py wait {old} --region us-east-1"
    )
    aws.set_status(old, "Completed")
    assert error_of(old) == (
        f"run debug is complete ({old}); to train longer, launch the recipe with --run debug and more steps"
    )
    aws.clients.s3.delete_object(Bucket=BUCKET, Key=f"titanlike/code/{new}/request.json")
    assert error_of("debug") == (
        f"s3://a-bucket/titanlike/code/{new}/request.json does not exist; to resume, launch the recipe with --run debug"
    )
    aws.set_status(new, "Stopped", checkpoint_config=None)
    assert error_of(new) == f"{new}: cannot be resumed, it was not submitted by launch.py"
    assert error_of("debg").endswith("did you mean debug?")


def test_stop(aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    job = aws.submit()
    with pytest.raises(UserError, match=f"{job}: cannot be stopped, its status is Completed"):
        run(["stop", "debug"])
    aws.set_status(job, "InProgress", "Training")
    assert output(capsys, "stop", job) == (
        f"stopping {job}: it saves a checkpoint within 120 seconds; to resume: python sagemaker/launch.py resume {job} "
        "--region us-east-1\n"
    )
    assert find_job(aws.clients, job).status == "Stopping"
    assert output(capsys, "stop", job) == f"{job} is already stopping\n"
    assert [name for name, _ in aws.calls].count("StopTrainingJob") == 1
    aws.set_status(job, "InProgress", "Training")
    aws.before("StopTrainingJob", lambda: error_response("AccessDeniedException", "User: x may not"))
    with pytest.raises(UserError, match=r"access denied \(StopTrainingJob: User: x may not\)"):
        run(["stop", job])


def test_help_and_invalid_arguments_contact_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import jobs, sys; jobs.build_parser(); assert not {'boto3', 'botocore', 'torch', 'rich'} & sys.modules.keys()"
    )
    variables = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'sagemaker'}")
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    for arguments in (["list", "--limit", "0"], ["logs", "x", "--tail", "-1"], ["describe"], ["other"]):
        with pytest.raises(SystemExit, match="2"):
            run(arguments)
    assert "--limit: expected an integer of at least 1, got '0'" in capsys.readouterr().err
