"""An AWS of one's own: moto's server on loopback, and what it leaves to be said: states, failures, lost networks.

Jobs complete there at once; `set` gives them another state, and `before` does so just before a question is answered.
"""

import contextlib
import itertools
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from instances import INSTANCE_TYPES
from moto.sagemaker.models import sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse
from request import TIMESTAMP, Job, request_for
from service import Clients

from tests.launching import ROOT

REGION, BUCKET = "us-east-1", "a-bucket"
GROUP = "/aws/sagemaker/TrainingJobs"
ACCOUNT = "123456789012"
CLOCK = datetime(2026, 10, 1, 10, 0, 0, tzinfo=timezone.utc)


class Answer:
    """What botocore takes for an answer, when it is given in place of one."""

    def __init__(self, status: int) -> None:
        self.status_code = status


def refusal(code: str, message: str = "", status: int = 400) -> tuple[Answer, dict[str, Any]]:
    """To be returned by what runs `before` a call, which then fails so."""
    metadata = {"HTTPStatusCode": status}
    return Answer(status), {"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}


class Aws:
    """What a test does with it."""

    def __init__(self, address: str, clients: Clients) -> None:
        self.address, self.clients = address, clients
        self.asked: list[tuple[str, dict[str, Any]]] = []  # operations and what they were given
        self._stamps = itertools.count()
        self._hooks: list[tuple[Any, str, Callable[..., Any]]] = []
        clients.s3.create_bucket(Bucket=BUCKET)
        for client in (clients.sagemaker, clients.logs):
            self._hook(client, "provide-client-params", lambda params, model, **_: self._note(model.name, params))

    def _note(self, operation: str, words: dict[str, Any]) -> None:
        self.asked.append((operation, dict(words)))

    def _hook(self, client: Any, event: str, do: Callable[..., Any]) -> None:
        client.meta.events.register(event, do)
        self._hooks.append((client, event, do))

    def send(self, run: str = "debug", *, prefix: str = "titanlike", **changes: Any) -> str:
        """Send a job, as launch.py does. Returns its name; the next one is of a later second."""
        stamp = (CLOCK + timedelta(seconds=next(self._stamps))).strftime(TIMESTAMP)
        asked: dict[str, Any] = {
            "arguments": ("recipe.toml",),
            "instance_type": INSTANCE_TYPES["ml.p5.48xlarge"],
            "num_instances": 2,
            "role": f"arn:aws:iam::{ACCOUNT}:role/job",
            "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/image:1",
        } | changes
        job = Job(run=run, timestamp=stamp, region=REGION, bucket=BUCKET, prefix=prefix, **asked)
        request = request_for(job)
        key = f"{prefix}/code/{job.name}/request.json"
        self.clients.s3.put_object(Bucket=BUCKET, Key=key, Body=json.dumps(request).encode())
        self.clients.sagemaker.create_training_job(**request)
        return job.name

    def running(self, run: str = "debug") -> str:
        """Send a job that has its machines and trains."""
        job = self.send(run)
        self.set(job, "InProgress", "Training", training_start_time=datetime.now(timezone.utc))
        return job

    def ending(self, job: str, status: str = "Completed", **more: Any) -> Callable[[], None]:
        """The step in which the job ends."""
        return lambda: self.set(job, status, training_start_time=CLOCK, **more)

    def set(self, job: str, status: str, secondary: str = "", **attributes: Any) -> None:
        """Give a job a state, and other things that a description of it has."""
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

    def say(self, job: str, host: str, *lines: str, ago: float = 60.0, number: int = 1234567890) -> None:
        """Let a host have said something, a line a second, the first so many seconds ago."""
        logs, stream = self.clients.logs, f"{job}/{host}-{number}"
        with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_group(logGroupName=GROUP)
        with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
        begin = time.time() - ago
        events = [{"timestamp": int((begin + i) * 1000), "message": line} for i, line in enumerate(lines)]
        logs.put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=events)

    def before(self, operation: str, do: Callable[[], Any]) -> None:
        """Do something before each call: change a state, raise what a dead network raises, or return a refusal."""
        is_of_logs = operation in ("DescribeLogStreams", "GetLogEvents")
        client = self.clients.logs if is_of_logs else self.clients.sagemaker
        event = f"before-call.{'cloudwatch-logs' if is_of_logs else 'sagemaker'}.{operation}"
        self._hook(client, event, lambda **_: do())

    def reset(self) -> None:
        """Forget everything."""
        for client, event, do in self._hooks:
            client.meta.events.unregister(event, do)
        self.forget(self.address)

    @staticmethod
    def forget(address: str) -> None:
        """Empty the account."""
        request = urllib.request.Request(f"{address}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=10).close()


def stop_training_job(response: SageMakerResponse) -> str:
    """What moto lacks."""
    record = response.sagemaker_backend.training_jobs[response._get_param("TrainingJobName")]
    record.training_job_status = record.secondary_status = "Stopping"
    record.secondary_status_transitions = [
        *record.secondary_status_transitions,
        {"Status": "Stopping", "StartTime": datetime.now(timezone.utc), "StatusMessage": "Stopping the training job"},
    ]
    return "{}"


def leaves(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *words: str) -> int:
    """The exit code of a program that is given this command line, here in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["program.py", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


# Steps for `before`.


def one_by_one(*steps: Callable[[], Any]) -> Callable[[], Any]:
    """Does the next of these each time, and nothing after the last."""
    left = list(steps)
    return lambda: left.pop(0)() if left else None


def nothing() -> None:
    """A look at which nothing has changed."""


def away() -> None:
    """No network."""
    raise EndpointConnectionError(endpoint_url="https://api.sagemaker.us-east-1.amazonaws.com/")
