"""What SageMaker would refuse, hours later or at once, said before anything is uploaded."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from request import Job, arguments

ARN = r"arn:aws[a-z-]*"
WRONG = {
    "role": (
        rf"{ARN}:iam::\d{{12}}:role/[\w+=,.@/-]+",
        "the ARN of a role, such as arn:aws:iam::123456789012:role/NAME",
    ),
    "bucket": (
        r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
        "the name of a bucket: 3 to 63 small letters, digits, dots, dashes",
    ),
    "region": (r"[a-z]{2}(-[a-z]+)+-\d", "a region, such as us-east-1"),
    "prefix": (r"[A-Za-z0-9][A-Za-z0-9-]*", "letters, digits and dashes"),
    "training_plan": (rf"({ARN}:sagemaker:[a-z0-9-]+:\d{{12}}:training-plan/.+)?", "the ARN of a training plan"),
}


def problems(job: Job) -> Iterator[str]:
    """What is wrong with what was asked."""
    for name, (pattern, wanted) in WRONG.items():
        value = getattr(job, name)
        if not re.fullmatch(pattern, value):
            yield f"--{name.replace('_', '-')} {value}: give {wanted}"
    longest = 63 - len(job.stamp) - len(job.prefix) - 2
    if len(job.name) > 63:
        yield f"--run {job.run}: SageMaker takes 63 characters, and {job.name} has {len(job.name)}; use {longest} or fewer"
    if job.spot and job.training_plan:
        yield "--spot and --training-plan: a training plan is not spot capacity; leave one of them out"
    if job.spot and job.keep_alive_minutes:
        yield "--spot and --keep-alive: SageMaker keeps no spot machines warm; leave one of them out"
    if job.keep_alive_minutes > 360:
        yield f"--keep-alive {job.keep_alive_minutes}: SageMaker keeps machines for 360 minutes at most"
    if bool(job.subnets) != bool(job.security_groups):
        yield "--subnet and --security-group go together: give both, or neither"
    on_fsx = [channel for channel in (*job.channels, job.checkpoints) if channel and channel.address.startswith("fsx:")]
    if on_fsx and not job.subnets:
        yield f"{on_fsx[0].address}: FSx lies in a VPC; give --subnet and --security-group of it"
    for channel in on_fsx:
        if not re.fullmatch(r"fsx://fs-[0-9a-f]{8,}/[\w/.-]+", channel.address):
            yield f"{channel.address}: give fsx://fs-0123456789abcdef0/MOUNT/FOLDER, with the file system's mount name first"
    for word in arguments(job):
        if len(word) > 256:
            yield f"{word[:40]}...: an argument of a job has 256 characters at most; put it into the recipe"
    for name, value in job.environment.items():
        if len(value) > 512:
            yield f"--env {name}: SageMaker takes values of 512 characters at most, and this has {len(value)}"


@cache
def _model() -> Any:
    import botocore.session

    return botocore.session.Session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape


def model_problems(request: dict[str, Any]) -> list[str]:
    """What botocore's own model of the request says against it: kinds, names, lengths, choices and patterns."""
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(request, _model())
    found = [line for line in report.generate_report().splitlines() if line]
    return found + list(_values(request, _model(), ""))


def _values(value: Any, shape: Any, path: str) -> Iterator[str]:
    """What ParamValidator leaves to the service: choices, patterns and largest sizes."""
    limits = shape.metadata
    if shape.type_name == "structure" and isinstance(value, dict):
        for name, member in shape.members.items():
            if name in value:
                yield from _values(value[name], member, f"{path}.{name}" if path else name)
    elif shape.type_name == "list" and isinstance(value, list):
        for index, one in enumerate(value):
            yield from _values(one, shape.member, f"{path}[{index}]")
    elif shape.type_name == "map" and isinstance(value, dict):
        for name, one in value.items():
            yield from _values(one, shape.value, f"{path}.{name}")
    elif shape.type_name == "string" and isinstance(value, str):
        pattern = limits.get("pattern", "")
        if value not in limits.get("enum", [value]):
            yield f"{path} = {value}: not one of those that botocore {_version()} knows"
        elif len(value) > limits.get("max", len(value)):
            yield f"{path} = {value[:40]}...: longer than {limits['max']}"
        elif pattern and "\\p" not in pattern and not re.fullmatch(pattern, value):
            yield f"{path} = {value}: does not match {pattern}"
    elif shape.type_name in ("integer", "long") and isinstance(value, int) and value > limits.get("max", value):
        yield f"{path} = {value}: more than {limits['max']}"


def _version() -> str:
    import botocore

    return botocore.__version__
