"""Submitted jobs as SageMaker describes them: find, stop and resume."""

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from instances import InstanceType, find_instance_type, instance_types
from request import CODE, OPT, PREFIX, base_name
from service import Clients, NotFound

from titanlike.config import UserError
from titanlike.config.base import nearest

ACTIVE = ("InProgress", "Stopping")
TIMESTAMP_SUFFIX = re.compile(r"-\d{8}-\d{6}$")
VALID_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")


class JobStatus:
    """A job, from its `DescribeTrainingJob` response."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description
        self.name: str = description["TrainingJobName"]
        self.status: str = description["TrainingJobStatus"]
        self.secondary: str = description.get("SecondaryStatus", self.status)
        self.reason: str = description.get("FailureReason", "")
        self.is_active = self.status in ACTIVE
        self.is_spot = bool(description.get("EnableManagedSpotTraining"))
        self.created: datetime = description["CreationTime"]
        self.started: datetime | None = description.get("TrainingStartTime")  # provisioning is not billed
        self.ended: datetime = description.get("TrainingEndTime", description.get("LastModifiedTime", self.created))
        self.history: list[dict[str, Any]] = description.get("SecondaryStatusTransitions", [])
        self.resources: dict[str, Any] = description.get("ResourceConfig", {})
        self.instances = f"{self.resources.get('InstanceCount', '?')} x {self.resources.get('InstanceType', '?')}"
        self.run_dir: str = description.get("CheckpointConfig", {}).get("S3Uri", "").rstrip("/")
        # The name of the run; empty if the job was not submitted by launch.py.
        self.run = description.get("CheckpointConfig", {}).get("LocalPath", "").rstrip("/").rpartition("/")[2]
        self.arguments: list[str] = description.get("AlgorithmSpecification", {}).get("ContainerArguments", [])
        self._sources = {one["ChannelName"]: one["DataSource"] for one in description.get("InputDataConfig", [])}
        self.code: str = self._sources.get(CODE, {}).get("S3DataSource", {}).get("S3Uri", "").rstrip("/")

    def locations(self) -> dict[str, str]:
        """Returns the URIs of the job's files."""
        checkpoints = dict(one.partition("=")[::2] for one in self.arguments).get("--checkpoint.dir", "")
        if checkpoints.startswith(OPT):
            mounted = self._sources.get(checkpoints.rpartition("/")[2], {}).get("FileSystemDataSource")
            checkpoints = f"fsx://{mounted['FileSystemId']}{mounted['DirectoryPath']}" if mounted else checkpoints
        output = self.description.get("OutputDataConfig", {}).get("S3OutputPath", "").rstrip("/")
        return {
            "code": self.code,
            "checkpoints": f"{checkpoints}/{self.run}" if checkpoints else "",
            "run folder": self.run_dir,
            "output": f"{output}/{self.name}" if output else "",
        }

    def seconds(self) -> float | None:
        """Returns the time since the instances were provisioned, until now or the job's end."""
        if self.started is None:
            return None
        return ((now() if self.is_active else self.ended) - self.started).total_seconds()

    def duration(self) -> str:
        """Returns `seconds` as text; empty if the job has not started."""
        seconds = self.seconds()
        return "" if seconds is None else clock(seconds)

    @property
    def instance_type(self) -> InstanceType | None:
        """The instance type, or None if no hardware file describes it."""
        name = self.resources.get("InstanceType", "")
        return find_instance_type(name) if name in instance_types() else None

    @property
    def price_source(self) -> str:
        """Region, kind, date and source of the price of `cost`."""
        return self.instance_type.hardware.price_source if self.instance_type else ""

    def cost(self) -> str:
        """Returns the price of the job; empty if the instance type's price is unknown."""
        instance_type = self.instance_type
        if self.resources.get("TrainingPlanArn"):
            return "prepaid"
        if instance_type is None or instance_type.price is None:
            return ""
        billed = None if self.is_active else self.description.get("BillableTimeInSeconds")
        seconds = (self.seconds() or 0.0) if billed is None else billed
        dollars = seconds * self.resources["InstanceCount"] * instance_type.price / 3600
        # The discount of spot instances is known from the billed seconds, after the job's end.
        at_most = "at most " if self.is_spot and billed is None and seconds else ""
        return f"{at_most}${dollars:,.2f}{' so far' if self.is_active else ''}"


def describe(clients: Clients, name: str) -> JobStatus | None:
    """Returns the job of this name, or None."""
    if len(name) > 63 or not VALID_NAME.fullmatch(name):
        return None
    try:
        return JobStatus(clients.sagemaker.describe_training_job(TrainingJobName=name))
    except NotFound:
        return None


def job_names(clients: Clients, base: str, limit: int | None = None, **filters: Any) -> list[str]:
    """Returns the names that begin with `base` and a dash, newest first."""
    filters |= {"NameContains": f"{base}-"[:63], "SortBy": "CreationTime", "SortOrder": "Descending"}
    paginator = clients.sagemaker.get_paginator("list_training_jobs")
    pages = paginator.paginate(**filters, PaginationConfig={"PageSize": 100})
    summaries = (one for page in pages for one in page["TrainingJobSummaries"])
    matches = (one for one in summaries if one["TrainingJobName"].startswith(f"{base}-"))
    newest_first = sorted(itertools.islice(matches, limit), key=lambda one: one["CreationTime"], reverse=True)
    return [one["TrainingJobName"] for one in newest_first]


def jobs_of_run(clients: Clients, run: str, base: str, **filters: Any) -> Iterator[JobStatus]:
    """Yields the jobs of a run, newest first."""
    for name in job_names(clients, base, **filters):
        # Job names are ambiguous: another run's name may continue this one's, or differ only in characters replaced by dashes.
        if TIMESTAMP_SUFFIX.sub("", name) == base and (job := describe(clients, name)) and job.run == run:
            yield job


def newest_job(clients: Clients, run: str, prefix: str = PREFIX) -> JobStatus | None:
    """Returns the newest job of a run."""
    return next(jobs_of_run(clients, run, base_name(prefix, run)), None)


def active_job(clients: Clients, run: str, base: str) -> JobStatus | None:
    """Returns the active job of a run."""
    return next((job for status in ACTIVE for job in jobs_of_run(clients, run, base, StatusEquals=status)), None)


def find_job(clients: Clients, name: str, prefix: str = PREFIX) -> JobStatus:
    """Returns the job of this name, or the newest job of the run of this name."""
    base = base_name(prefix, "")
    is_job_name = TIMESTAMP_SUFFIX.search(name) or name.startswith(f"{base}-")
    found = (describe(clients, name) if is_job_name else None) or newest_job(clients, name, prefix)
    if found:
        return found
    names = job_names(clients, base, 100)
    if not names:
        raise UserError(
            f"{name}: no job in {clients.region} has a name that begins with {base}-; check --region and --prefix"
        )
    jobs: dict[str, str] = {}  # newest job of each run, by the run's name as it appears in job names
    for one in names:
        jobs.setdefault(TIMESTAMP_SUFFIX.sub("", one).removeprefix(f"{base}-"), one)
    match = nearest(name, [*jobs, *names])
    if match in jobs and (job := describe(clients, jobs[match])):
        match = job.run or match
    hint = f"did you mean {match}?" if match else "run `python sagemaker/launch.py list`"
    raise UserError(f"{name}: no such job or run in {clients.region}; {hint}")


def stop(clients: Clients, name: str) -> str:
    """Stops a job. Returns a message for the user."""
    job = describe(clients, name)
    if job is None or not job.is_active:
        raise UserError(f"{name}: cannot be stopped, its status is {job.secondary if job else 'unknown'}")
    if job.status == "Stopping":
        return f"{name} is already stopping"
    clients.sagemaker.stop_training_job(TrainingJobName=name)
    return f"stopping {name}: it saves a checkpoint within 120 seconds; to resume: {command('resume', name, clients.region)}"


def resume_request(clients: Clients, name: str, timestamp: str, prefix: str = PREFIX) -> dict[str, Any]:
    """Returns the request of a job, or of a run's newest job, under a new job name.

    The request is stored beside the job's code. A resumed job uses the code of the original one.
    """
    job = find_job(clients, name, prefix)
    base = TIMESTAMP_SUFFIX.sub("", job.name)
    if not (job.run and job.code):
        raise UserError(f"{job.name}: cannot be resumed, it was not submitted by launch.py")
    if active := active_job(clients, job.run, base):
        raise UserError(
            f"run {job.run} has an active job, {active.name} ({active.secondary}): "
            f"{command('wait', active.name, clients.region)}"
        )
    launch_again = f"launch the recipe with --run {job.run}"
    if job.status == "Completed":
        raise UserError(f"run {job.run} is complete ({job.name}); to train longer, {launch_again} and more steps")
    location = urlsplit(f"{job.code}/request.json")
    try:
        content = clients.read_object(location.netloc, location.path.lstrip("/"))
    except NotFound:
        raise UserError(f"{location.geturl()} does not exist; to resume, {launch_again}") from None
    request: dict[str, Any] = {**json.loads(content), "TrainingJobName": f"{base}-{timestamp}"}
    algorithm = request["AlgorithmSpecification"]  # a key with which the run would go back to that step
    kept = [one for one in algorithm["ContainerArguments"] if not one.startswith("--checkpoint.resume_from=")]
    return {**request, "AlgorithmSpecification": {**algorithm, "ContainerArguments": kept}}


def command(name: str, job: str, region: str) -> str:
    """Returns the command line for an operation on a job."""
    return shlex.join(["python", "sagemaker/launch.py", name, job, "--region", region])


def now() -> datetime:
    """Returns the time with a time zone, like the times of AWS."""
    return datetime.now(timezone.utc)


def clock(seconds: float) -> str:
    """Formats a duration as h:mm:ss."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
