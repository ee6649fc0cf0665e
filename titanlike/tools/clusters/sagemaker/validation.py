"""Checks of a job's settings and request that SageMaker would otherwise make after the upload."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from titanlike.config.base import shown
from titanlike.tools.clusters.sagemaker.request import TrainingJob, container_arguments

ARN = r"arn:aws[a-z-]*"
PATTERNS = {
    "run": (
        r"[\w+=@-][\w.+=@-]*",
        "a name with letters, digits and . _ + = @ - only, which does not begin with a point",
    ),
    "role": (
        rf"{ARN}:iam::\d{{12}}:role/[\w+=,.@/-]+",
        "the ARN of an IAM role, such as arn:aws:iam::123456789012:role/NAME",
    ),
    "bucket": (r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "3 to 63 lowercase letters, digits, dots and dashes"),
    "region": (r"[a-z]{2}(-[a-z]+)+-\d", "a region, such as us-east-1"),
    "prefix": (r"[A-Za-z0-9][A-Za-z0-9-]*", "letters, digits and dashes"),
    "training_plan": (rf"({ARN}:sagemaker:[a-z0-9-]+:\d{{12}}:training-plan/.+)?", "the ARN of a training plan"),
}


def job_errors(job: TrainingJob) -> Iterator[str]:
    """Yields one sentence for each invalid setting."""
    for name, (pattern, expected) in PATTERNS.items():
        value = getattr(job, name)
        if not re.fullmatch(pattern, value):
            yield f"--{name.replace('_', '-')} {shown(value)}: expected {expected}"
    if len(job.name) > 63:
        longest = 63 - len(job.timestamp) - len(job.prefix) - 2
        yield (
            f"--run {job.run}: the job name {job.name} has {len(job.name)} characters, SageMaker's limit is 63; use a run name "
            f"of at most {longest}"
        )
    if job.spot and job.training_plan:
        yield "--spot and --training-plan exclude each other: a training plan is not spot capacity; remove one"
    if job.spot and job.keep_alive:
        yield "--spot and --keep-alive exclude each other: SageMaker has no warm pools of spot instances; remove one"
    if job.keep_alive > 360:
        yield f"--keep-alive {job.keep_alive}: SageMaker's limit is 360 minutes"
    if bool(job.subnets) != bool(job.security_groups):
        yield "--subnet and --security-group must be used together"
    on_fsx = [channel for channel in (*job.channels, job.checkpoints) if channel and channel.uri.startswith("fsx:")]
    if on_fsx and not job.subnets:
        yield f"{on_fsx[0].uri}: FSx requires a VPC; add --subnet and --security-group"
    for channel in on_fsx:
        if not re.fullmatch(r"fsx://fs-[0-9a-f]{8,}/[\w/.-]+", channel.uri):
            yield f"{channel.uri}: expected fsx://fs-0123456789abcdef0/MOUNT/FOLDER, beginning with the file system's mount name"
    for argument in container_arguments(job):
        if len(argument) > 256:
            yield f"{argument[:40]}...: SageMaker's limit is 256 characters per argument; put the value into the recipe"
    for name, value in job.environment.items():
        if len(value) > 512:
            yield f"--env {name}: the value has {len(value)} characters, SageMaker's limit is 512"


@cache
def _request_shape() -> Any:
    import botocore.session

    return botocore.session.Session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape


def request_errors(request: dict[str, Any]) -> list[str]:
    """Validates a request against botocore's model: names, types, lengths, enums and patterns."""
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(request, _request_shape()).generate_report()
    return [*filter(None, report.splitlines()), *_value_errors(request, _request_shape(), "")]


def _value_errors(value: Any, shape: Any, path: str) -> Iterator[str]:
    """Checks enums, patterns and maxima, which ParamValidator leaves to the service."""
    limits = shape.metadata
    if isinstance(value, dict) and shape.type_name in ("structure", "map"):
        for key, item in value.items():
            member = shape.members.get(key) if shape.type_name == "structure" else shape.value
            if member is not None:
                yield from _value_errors(item, member, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and shape.type_name == "list":
        for index, item in enumerate(value):
            yield from _value_errors(item, shape.member, f"{path}[{index}]")
    elif isinstance(value, str) and shape.type_name == "string":
        pattern = limits.get("pattern", "")
        if value not in limits.get("enum", [value]):
            yield f"{path} = {value}: not supported by the installed botocore"
        elif len(value) > limits.get("max", len(value)):
            yield f"{path} = {value[:40]}...: longer than {limits['max']} characters"
        elif pattern and "\\p" not in pattern and not re.fullmatch(pattern, value):
            yield f"{path} = {value}: does not match {pattern}"
    elif isinstance(value, int) and shape.type_name in ("integer", "long") and value > limits.get("max", value):
        yield f"{path} = {value}: the maximum is {limits['max']}"
