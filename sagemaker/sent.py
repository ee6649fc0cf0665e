"""Jobs that were sent, as the service tells of them: finding, stopping, going on with one."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from machines import MACHINES
from request import CODE, OPT, base_name
from service import Clients, is_missing, plainly

from titanlike.config import UserError
from titanlike.config.load import nearest

PREFIX = "titanlike"
PROGRAM = "python sagemaker/launch.py"
RUNNING = ("InProgress", "Stopping")
STAMPED = re.compile(r"-\d{8}-\d{6}$")  # the end of a job's name: see STAMP in request.py
JOB_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")  # as SageMaker has it


@dataclass(frozen=True)
class SentJob:
    """A job as the service tells of it: what `DescribeTrainingJob` answers."""

    answer: dict[str, Any]

    @property
    def name(self) -> str:
        return self.answer["TrainingJobName"]

    @property
    def status(self) -> str:
        return self.answer["TrainingJobStatus"]

    @property
    def secondary(self) -> str:
        return self.answer.get("SecondaryStatus", self.status)

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING

    @property
    def run(self) -> str:
        """The run that it is of; empty for a job that this toolkit did not send."""
        path = self.answer.get("CheckpointConfig", {}).get("LocalPath", "")
        return path.rstrip("/").rpartition("/")[2]

    @property
    def machines(self) -> str:
        resources = self.answer.get("ResourceConfig", {})
        return f"{resources.get('InstanceCount', '?')} x {resources.get('InstanceType', '?')}"

    @property
    def is_spot(self) -> bool:
        return bool(self.answer.get("EnableManagedSpotTraining"))

    @property
    def created(self) -> datetime:
        return self.answer["CreationTime"]

    @property
    def started(self) -> datetime | None:
        """When its machines were there: what comes before is not billed."""
        return self.answer.get("TrainingStartTime")

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.answer.get("SecondaryStatusTransitions", [])

    @property
    def code(self) -> str:
        """Where the files are that it runs, and its request."""
        return next(
            (
                one["DataSource"]["S3DataSource"]["S3Uri"].rstrip("/")
                for one in self.answer.get("InputDataConfig", [])
                if one["ChannelName"] == CODE and "S3DataSource" in one["DataSource"]
            ),
            "",
        )

    def places(self) -> dict[str, str]:
        """Where its things are."""
        pairs = (word.partition("=") for word in self.answer["AlgorithmSpecification"].get("ContainerArguments", []))
        kept = {name: value for name, _, value in pairs}.get("--checkpoint.dir", "")
        if kept.startswith(OPT):  # on FSx
            kept = self._file_systems().get(kept.rpartition("/")[2], kept)
        output = self.answer.get("OutputDataConfig", {}).get("S3OutputPath", "").rstrip("/")
        return {
            "code": self.code,
            "checkpoints": f"{kept}/{self.run}" if kept else "",
            "run folder": self.answer.get("CheckpointConfig", {}).get("S3Uri", "").rstrip("/"),
            "output": f"{output}/{self.name}" if output else "",
        }

    def _file_systems(self) -> dict[str, str]:
        """Addresses by channel."""
        sources = {one["ChannelName"]: one["DataSource"] for one in self.answer.get("InputDataConfig", [])}
        return {
            name: f"fsx://{source['FileSystemDataSource']['FileSystemId']}{source['FileSystemDataSource']['DirectoryPath']}"
            for name, source in sources.items()
            if "FileSystemDataSource" in source
        }

    def seconds(self) -> float | None:
        """How long it has had its machines."""
        if self.started is None:
            return None
        until = now() if self.is_running else self.answer.get("TrainingEndTime", self.answer["LastModifiedTime"])
        return (until - self.started).total_seconds()

    def seconds_since_end(self) -> float:
        """Of a job that has ended."""
        return (now() - self.answer.get("TrainingEndTime", self.answer["LastModifiedTime"])).total_seconds()

    def cost(self) -> str:
        """Dollars, if the price of its machines is known."""
        resources = self.answer.get("ResourceConfig", {})
        machine = MACHINES.get(resources.get("InstanceType", ""))
        if resources.get("TrainingPlanArn"):
            return "prepaid"
        if machine is None or machine.price is None:
            return ""
        final = None if self.is_running else self.answer.get("BillableTimeInSeconds")
        billed = (self.seconds() or 0.0) if final is None else final
        text = f"${billed * resources['InstanceCount'] * machine.price / 3600:,.2f}"
        # Spot is cheaper: by how much is told at the end.
        most = "at most " if self.is_spot and final is None and billed else ""
        return f"{most}{text}{' so far' if self.is_running else ''}"


def described(clients: Clients, name: str) -> SentJob | None:
    """The job of exactly this name; None if there is none."""
    from botocore.exceptions import ClientError

    if not (len(name) <= 63 and JOB_NAME.fullmatch(name)):
        return None
    with plainly(clients.region):
        try:
            return SentJob(clients.sagemaker.describe_training_job(TrainingJobName=name))
        except ClientError as error:
            if is_missing(error):
                return None
            raise


def names(clients: Clients, base: str, enough: int = 10**9, status: str = "") -> list[str]:
    """Names of jobs that are BASE-..., newest first."""
    found: list[dict[str, Any]] = []
    words: dict[str, Any] = {"StatusEquals": status} if status else {}
    while True:
        with plainly(clients.region):
            answer = clients.sagemaker.list_training_jobs(
                NameContains=f"{base}-"[:63], SortBy="CreationTime", SortOrder="Descending", MaxResults=100, **words
            )
        found += [one for one in answer["TrainingJobSummaries"] if one["TrainingJobName"].startswith(f"{base}-")]
        words["NextToken"] = answer.get("NextToken")
        if not words["NextToken"] or len(found) >= enough:
            break
    found.sort(key=lambda one: one["CreationTime"], reverse=True)
    return [one["TrainingJobName"] for one in found[:enough]]


def jobs_of(clients: Clients, run: str, base: str, status: str = "") -> Iterator[SentJob]:
    """The jobs of a run that are called BASE-STAMP, newest first."""
    for name in names(clients, base, status=status):
        # Names of other runs may begin with this one's, or be the same: to SageMaker "a.b" is "a-b".
        if STAMPED.sub("", name) == base and (job := described(clients, name)) and job.run == run:
            yield job


def last_job(clients: Clients, run: str, prefix: str = PREFIX) -> SentJob | None:
    """The newest job of a run."""
    return next(jobs_of(clients, run, base_name(prefix, run)), None)


def running(clients: Clients, run: str, prefix: str = PREFIX) -> SentJob | None:
    """The job of a run that has not ended, if there is one."""
    return _running(clients, run, base_name(prefix, run))


def _running(clients: Clients, run: str, base: str) -> SentJob | None:
    return next((job for status in RUNNING for job in jobs_of(clients, run, base, status)), None)


def find(clients: Clients, name: str, prefix: str = PREFIX) -> SentJob:
    """The job of this name, or the newest of the run of this name."""
    is_job = STAMPED.search(name) or name.startswith(f"{base_name(prefix, '')}-")
    found = (described(clients, name) if is_job else None) or last_job(clients, name, prefix)
    if found is None:
        raise _unknown(clients, name, prefix)
    return found


def _unknown(clients: Clients, name: str, prefix: str) -> UserError:
    base = base_name(prefix, "")
    jobs = names(clients, base, 100)
    if not jobs:
        return UserError(
            f"{name}: no job in {clients.region} has a name that begins with {base}-; see --region and --prefix"
        )
    runs: dict[str, str] = {}  # by what is seen of each in its jobs' names
    for one in jobs:
        runs.setdefault(STAMPED.sub("", one).removeprefix(f"{base}-"), one)
    near = nearest(name, [*runs, *jobs])
    if near in runs and (job := described(clients, runs[near])):
        near = job.run or near
    hint = f"did you mean {near}?" if near else "`python sagemaker/launch.py list` shows those that there are"
    return UserError(f"{name}: there is no such job or run in {clients.region}; {hint}")


def stop(clients: Clients, name: str) -> str:
    """Tell a job to stop. Returns what there is to say of it."""
    job = described(clients, name)
    if job is None or not job.is_running:
        raise UserError(f"{name}: there is nothing to stop, it is {job.secondary if job else 'not there any more'}")
    if job.status == "Stopping":
        return f"{name} is being stopped already"
    with plainly(clients.region):
        clients.sagemaker.stop_training_job(TrainingJobName=name)
    return f"{name} is told to stop: it saves, within 120 seconds; to go on from there: {line('resume', name, clients.region)}"


def resume_request(clients: Clients, name: str, stamp: str, prefix: str = PREFIX) -> dict[str, Any]:
    """The request of this job, or of the newest of this run, under a new name. It is read from where the job's code is: a
    resumed job runs the code of the one before, and so leads to the same request."""
    from botocore.exceptions import ClientError

    job = find(clients, name, prefix)
    base = STAMPED.sub("", job.name)
    if not (job.run and job.code):
        raise UserError(f"{job.name}: `launch.py` has not sent this job, and cannot go on with it")
    if busy := _running(clients, job.run, base):
        raise UserError(
            f"{job.run} is still trained by {busy.name} ({busy.secondary}): {line('wait', busy.name, clients.region)}"
        )
    again = f"send the recipe again, with --run {job.run}"
    if job.status == "Completed":
        raise UserError(f"{job.run} is done: {job.name} has completed; to train longer, {again} and more steps")
    where = urlsplit(f"{job.code}/request.json")
    with plainly(clients.region):
        try:
            found = clients.s3.get_object(Bucket=where.netloc, Key=where.path.lstrip("/"))["Body"].read()
        except ClientError as error:
            if not is_missing(error):
                raise
            raise UserError(f"{where.geturl()} is not there any more; {again}, and it goes on all the same") from None
    return {**json.loads(found), "TrainingJobName": f"{base}-{stamp}"}


def line(command: str, job: str, region: str) -> str:
    """What to type about a job."""
    return f"{PROGRAM} {command} {job} --region {region}"


def now() -> datetime:
    """The time, of a zone, as AWS's times are."""
    return datetime.now(timezone.utc)


def clock(seconds: float) -> str:
    """Hours, minutes, seconds: 1:02:03."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
