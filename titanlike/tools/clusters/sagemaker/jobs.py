"""Submitted jobs as SageMaker describes them: the newest and the active one of a run, and how one is stopped."""

import re
from collections.abc import Iterator
from typing import Any

from titanlike.tools.clusters.sagemaker.request import base_name
from titanlike.tools.clusters.sagemaker.service import Clients, NotFound

ACTIVE = ("InProgress", "Stopping")
TIMESTAMP_SUFFIX = re.compile(r"-\d{8}-\d{6}$")


class JobStatus:
    """A job, from its `DescribeTrainingJob` response."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.name: str = description["TrainingJobName"]
        self.status: str = description["TrainingJobStatus"]
        self.reason: str = description.get("FailureReason", "")
        self.is_active = self.status in ACTIVE
        # The name of the run; empty if the job was not submitted by `titanlike launch`.
        self.run = description.get("CheckpointConfig", {}).get("LocalPath", "").rstrip("/").rpartition("/")[2]
        self.arguments: list[str] = description.get("AlgorithmSpecification", {}).get("ContainerArguments", [])


def describe(clients: Clients, name: str) -> JobStatus | None:
    """Returns the job of this name, or None."""
    try:
        return JobStatus(clients.sagemaker.describe_training_job(TrainingJobName=name))
    except NotFound:
        return None


def jobs_of_run(clients: Clients, run: str, prefix: str, **filters: Any) -> Iterator[JobStatus]:
    """Yields the jobs of a run, newest first."""
    base = base_name(prefix, run)
    filters |= {"NameContains": f"{base}-"[:63]}
    pages = clients.sagemaker.get_paginator("list_training_jobs").paginate(
        **filters, PaginationConfig={"PageSize": 100}
    )
    names = (one["TrainingJobName"] for page in pages for one in page["TrainingJobSummaries"])
    for name in sorted((name for name in names if TIMESTAMP_SUFFIX.sub("", name) == base), reverse=True):
        # Another run's name may differ only in characters that job names replace by dashes.
        if (job := describe(clients, name)) and job.run == run:
            yield job


def newest_job(clients: Clients, run: str, prefix: str) -> JobStatus | None:
    """Returns the newest job of a run."""
    return next(jobs_of_run(clients, run, prefix), None)


def active_job(clients: Clients, run: str, prefix: str) -> JobStatus | None:
    """Returns the active job of a run."""
    return next((job for status in ACTIVE for job in jobs_of_run(clients, run, prefix, StatusEquals=status)), None)
