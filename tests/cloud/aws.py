"""AWS on loopback: moto's server, with job states and errors that moto does not simulate.

Jobs complete at once; `set_status` changes a job's status, and `before` runs a function before each call of an operation.
"""

import itertools
import json
import urllib.request
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from moto.sagemaker.models import sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse

from titanlike.tools.clusters.sagemaker.request import TIMESTAMP, TrainingJob, request_for
from titanlike.tools.clusters.sagemaker.service import Clients
from titanlike.tools.planning.hardware import load_hardware

REGION, BUCKET = "us-east-1", "a-bucket"
ACCOUNT = "123456789012"
FEW_FILES = ("recipes/*.py",)  # of the library, for jobs whose files no test reads
START = datetime(2026, 10, 1, 10, 0, 0, tzinfo=timezone.utc)


class FakeResponse:
    """An HTTP response as botocore expects it from a `before-call` handler."""

    def __init__(self, status: int) -> None:
        self.status_code = status


def error_response(code: str, message: str = "", status: int = 400) -> tuple[FakeResponse, dict[str, Any]]:
    """A response that makes a call fail, for functions that run `before` it."""
    metadata = {"HTTPStatusCode": status}
    return FakeResponse(status), {"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}


class Aws:
    """Controls the simulated account."""

    def __init__(self, address: str, clients: Clients) -> None:
        self.address, self.clients = address, clients
        self.calls: list[tuple[str, dict[str, Any]]] = []  # operations and their parameters
        self._stamps = itertools.count()
        self._hooks: list[tuple[Any, str, Callable[..., Any]]] = []
        clients.s3.create_bucket(Bucket=BUCKET)
        record = lambda params, model, **_: self._record(model.name, params)  # noqa: E731
        self._hook(clients.sagemaker, "provide-client-params", record)

    def _record(self, operation: str, parameters: dict[str, Any]) -> None:
        self.calls.append((operation, dict(parameters)))

    def _hook(self, client: Any, event: str, function: Callable[..., Any]) -> None:
        client.meta.events.register(event, function)
        self._hooks.append((client, event, function))

    def submit(self, run: str = "debug", *, prefix: str = "titanlike", **changes: Any) -> str:
        """Submits a job, as `titanlike launch` does. Returns its name; each job has a later timestamp."""
        timestamp = (START + timedelta(seconds=next(self._stamps))).strftime(TIMESTAMP)
        settings: dict[str, Any] = {
            "arguments": ("recipe.toml",),
            "instance_type": "ml.p5.48xlarge",
            "hardware": load_hardware("ml.p5.48xlarge"),
            "nodes": 2,
            "role": f"arn:aws:iam::{ACCOUNT}:role/job",
            "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/image:1",
        } | changes
        job = TrainingJob(run=run, timestamp=timestamp, region=REGION, bucket=BUCKET, prefix=prefix, **settings)
        request = request_for(job)
        key = f"{prefix}/code/{job.name}/request.json"
        self.clients.s3.put_object(Bucket=BUCKET, Key=key, Body=json.dumps(request).encode())
        self.clients.sagemaker.create_training_job(**request)
        return job.name

    def running(self, run: str = "debug", **changes: Any) -> str:
        """Submits a job, and lets it train."""
        job = self.submit(run, **changes)
        self.set_status(job, "InProgress", "Training", training_start_time=datetime.now(timezone.utc))
        return job

    def ending(self, job: str, status: str = "Completed", **more: Any) -> Callable[[], None]:
        """Returns a function that ends the job."""
        return lambda: self.set_status(job, status, training_start_time=START, **more)

    def set_status(self, job: str, status: str, secondary: str = "", **attributes: Any) -> None:
        """Changes a job's status, and other attributes of its description."""
        record = sagemaker_backends[ACCOUNT][REGION].training_jobs[job]
        now = datetime.now(timezone.utc)
        steps = record.secondary_status_transitions if secondary == record.secondary_status else []
        known = {
            "training_job_status": status,
            "secondary_status": secondary or status,
            "training_end_time": None if status in ("InProgress", "Stopping") else now,
            "secondary_status_transitions": steps or [{"Status": secondary or status, "StartTime": now}],
        }
        for name, value in (known | attributes).items():
            setattr(record, name, value)

    def before(self, operation: str, function: Callable[[], Any]) -> None:
        """Runs a function before each call: it may change a status, raise a network error, or return `error_response`."""
        self._hook(self.clients.sagemaker, f"before-call.sagemaker.{operation}", lambda **_: function())

    def reset(self) -> None:
        """Removes the hooks, and empties the account."""
        for client, event, function in self._hooks:
            client.meta.events.unregister(event, function)
        self.clear(self.address)

    @staticmethod
    def clear(address: str) -> None:
        """Empties the account."""
        request = urllib.request.Request(f"{address}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=10).close()


def stop_training_job(response: SageMakerResponse) -> str:
    """Implements StopTrainingJob, which moto lacks."""
    record = response.sagemaker_backend.training_jobs[response._get_param("TrainingJobName")]
    record.training_job_status = record.secondary_status = "Stopping"
    record.secondary_status_transitions = [
        *record.secondary_status_transitions,
        {"Status": "Stopping", "StartTime": datetime.now(timezone.utc), "StatusMessage": "Stopping the training job"},
    ]
    return "{}"


# Functions for `before`.


def in_sequence(*steps: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that runs the next step at each call, and does nothing after the last."""
    remaining = list(steps)
    return lambda: remaining.pop(0)() if remaining else None


def no_change() -> None:
    """A poll without a change."""
