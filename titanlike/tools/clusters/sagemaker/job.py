"""A recipe as a SageMaker training job: the checks of its settings, and what becomes of it: printed, simulated or submitted."""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.distill import RANDOM
from titanlike.recipe import PretrainRecipe
from titanlike.run.start import name_of
from titanlike.tools.clusters.sagemaker.bundle import Bundle, make_bundle
from titanlike.tools.clusters.sagemaker.options import IMAGES
from titanlike.tools.clusters.sagemaker.request import TIMESTAMP, Channel, TrainingJob, request_for, with_job_keys
from titanlike.tools.clusters.sagemaker.service import NO_REGION
from titanlike.tools.clusters.sagemaker.validation import job_errors, request_errors
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.plan import plan_or_none
from titanlike.tools.planning.report import brief

IMAGE_ACCOUNT = "763104351884"  # hosts the AWS images in these regions
REGIONS = {
    "ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "ca-central-1", "eu-central-1",
    "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3", "sa-east-1", "us-east-1", "us-east-2", "us-west-1", "us-west-2",
}  # fmt: skip
CHANNEL_KEYS = (
    "data.path", "data.mixture", "data.validation_path", "tokenizer.encoding", "checkpoint.initial", "distillation.teacher",
)  # fmt: skip
# Placeholders in a request that is not sent.
EXAMPLE_ROLE = "arn:aws:iam::123456789012:role/YOUR-ROLE"
EXAMPLE_BUCKET = "your-bucket"
DOCTOR_HOURS = 0.5


def launch(options: argparse.Namespace, recipe: Path, overrides: Mapping[str, str]) -> int:
    """Checks everything that can be checked locally, then prints, simulates or submits the job. Returns the exit code."""
    job = make_job(options, recipe)
    processes = options.processes if options.simulate else job.hardware.gpus_per_node
    bundle = make_bundle(
        recipe,
        overrides,
        job.nodes * processes,
        job_keys=lambda values: with_job_keys(job, values),
        s3=not options.simulate,
    )
    job = replace(job, arguments=bundle.arguments)
    if errors := [*recipe_errors(bundle.recipe, job), *job_errors(job)]:
        raise UserError("\n".join(errors))
    if options.simulate:
        return _simulate(options, request_for(job), bundle)
    if options.dry_run:
        print(report(job, bundle))
        return 0
    from titanlike.tools.clusters.sagemaker.service import make_clients
    from titanlike.tools.clusters.sagemaker.submit import select_sender, upload_and_submit

    sender = select_sender(options.sender)
    clients = make_clients(job.region)
    if job.bucket == EXAMPLE_BUCKET:
        job = replace(job, bucket=clients.default_bucket())
    name = upload_and_submit(clients, job, bundle, sender)
    print(f"to wait for its end: aws sagemaker wait training-job-completed-or-stopped --training-job-name {name}")
    return 0


def report(job: TrainingJob, bundle: Bundle) -> str:
    """Returns what `--dry-run` prints: the job, its plan, its files, and the request."""
    request, num_gpus = request_for(job), job.nodes * job.hardware.gpus_per_node
    plan = plan_or_none(bundle.recipe, num_gpus, job.hardware)
    sizes = {name: len(content) for name, content in bundle.contents.items()}
    library = [size for name, size in sizes.items() if name.startswith("titanlike/")]
    lines = [
        f"job         {job.name}, of run {job.run}",
        f"instances   {job.nodes}, {num_gpus} GPUs: {job.hardware.name}{', EFA' if job.hardware.efa_interfaces else ''}",
        *([f"plan        {brief(plan)}"] if plan else []),
        f"image       {job.image}",
        f"code        {job.code}",
        f"checkpoints {job.checkpoints.uri if job.checkpoints else f'{job.root}/checkpoints/{job.run}'}",
        f"run folder  {job.run_dir}",
        *(f"channel     {channel.key} = {channel.path}  from {channel.uri}" for channel in job.channels),
        f"request     {_validate(request)}",
        f"files       {len(sizes)}, {sum(sizes.values()):,} bytes",
        *(f"{size:>10,}  {name}" for name, size in sizes.items() if not name.startswith("titanlike/")),
        f"{sum(library):>10,}  titanlike/: {len(library)} files",
        "",
        json.dumps(request, indent=2),
    ]
    return "\n".join(lines)


def _validate(request: dict[str, Any]) -> str:
    try:
        errors = request_errors(request)
    except ImportError:
        return 'not validated: botocore is not installed; run: pip install "titanlike[sagemaker]"'
    if errors:
        raise UserError("\n".join(errors))
    return "valid according to botocore's model of the service"


def make_job(options: argparse.Namespace, recipe: Path) -> TrainingJob:
    """Builds the job's settings from the options and the environment, without the arguments of its program."""
    is_offline = options.dry_run or options.simulate
    region = (
        options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _configured_region()
    )
    if not region and not is_offline:
        raise UserError(NO_REGION)
    region = region or "us-east-1"
    role = options.role or os.environ.get("SAGEMAKER_ROLE", "")
    if not role and not is_offline:
        raise UserError(f"--role is missing: the ARN of an IAM role, such as {EXAMPLE_ROLE} (see docs/sagemaker.md)")
    if not options.image and region not in REGIONS and not options.simulate:
        raise UserError(f"--region {region}: the account of the AWS image is unknown; set its URI with --image")
    checkpoints = options.checkpoints
    if checkpoints and not checkpoints.startswith("fsx://"):
        raise UserError(f"--checkpoints {checkpoints}: expected fsx://FILESYSTEM/MOUNT/FOLDER; the default is S3")
    instance_type = f"ml.{options.instance_type.removeprefix('ml.')}"
    run = options.run_name or name_of(recipe.stem)
    settings = {
        field.name: getattr(options, field.name) for field in fields(TrainingJob) if hasattr(options, field.name)
    }
    settings |= {
        "run": f"{run}-doctor" if options.doctor else run,
        "max_hours": DOCTOR_HOURS if options.doctor else options.max_hours,
        "timestamp": time.strftime(TIMESTAMP),
        "arguments": [],
        "instance_type": instance_type,
        "hardware": load_hardware(
            options.hardware or instance_type, "--hardware" if options.hardware else "--instance-type"
        ),
        "region": region,
        "role": role or EXAMPLE_ROLE,
        "bucket": bucket_of(options) or EXAMPLE_BUCKET,
        "image": options.image or f"{IMAGE_ACCOUNT}.dkr.ecr.{region}.amazonaws.com/pytorch:{IMAGES[options.torch]}",
        "channels": parse_channels(options.channels),
        "checkpoints": Channel("checkpoints", checkpoints, writable=True) if checkpoints else None,
        "tags": dict(options.tags),
        "environment": dict(options.environment),
    }
    return TrainingJob(**settings)


def bucket_of(options: argparse.Namespace) -> str:
    """Returns the bucket that the options or the environment name, or ""."""
    return options.bucket or os.environ.get("SAGEMAKER_BUCKET", "")


def parse_channels(values: Sequence[tuple[str, str]]) -> list[Channel]:
    """Parses the values of `--channel`."""
    channels = []
    keys = [key for key, _ in values]
    for index, (key, value) in enumerate(values):
        uri, _, mode = value.partition(",")
        option = f"--channel {key}={value}"
        if key not in CHANNEL_KEYS:
            raise UserError(f"{option}: expected one of the keys {', '.join(CHANNEL_KEYS)}")
        if keys.count(key) > 1 and key != "data.mixture":
            raise UserError(f"--channel {key} is set twice; only data.mixture accepts several")
        if mode not in ("", "File", "FastFile"):
            raise UserError(f"{option}: unknown input mode {mode}; use File or FastFile")
        if not uri.startswith(("s3://", "fsx://")):
            raise UserError(f"{option}: expected s3://BUCKET/PREFIX or fsx://FILESYSTEM/MOUNT/FOLDER")
        number = keys[: index + 1].count(key) if key == "data.mixture" else 0
        channels.append(Channel(key, uri, mode or "File", number))
    return channels


def recipe_errors(recipe: PretrainRecipe, job: TrainingJob) -> Iterator[str]:
    """Yields an error for each local path that the job could not read, and each key that it sets itself or cannot have."""
    mounted = {channel.key for channel in job.channels}
    data = recipe.data
    for key, paths in (
        ("data.path", [data.path]),
        ("data.mixture", data.mixture),
        ("data.validation_path", [data.validation_path]),
    ):
        local = [path for path in paths if path and "://" not in path]
        if local and data.reads_paths and key not in mounted:
            uri = f"s3://BUCKET/{Path(local[0]).name}"
            copy = ["aws", "s3", "sync", local[0], uri]
            yield (
                f"{key} = {local[0]!r} is a local path, which the job cannot read: copy it to S3 ({shlex.join(copy)}) "
                f"and add --channel {shlex.quote(f'{key}={uri}')}"
            )
    for name in ("checkpoint.initial", "distillation.teacher"):
        section, _, key = name.partition(".")
        folder = getattr(getattr(recipe, section, None), key, "")
        if folder not in ("", RANDOM) and name not in mounted:
            yield (
                f"{name} = {folder!r} is a local path, which the job cannot read: copy it to S3 and add --channel "
                f"{name}=s3://BUCKET/{Path(folder).name}"
            )
    if local := [path for path in (*recipe.evaluation.tasks, *recipe.evaluation.data) if "://" not in path]:
        yield (
            f"evaluation: the job cannot read {local[0]!r}; omit it here, and run `titanlike evaluate` on the run's checkpoint"
        )
    encoding = recipe.tokenizer.encoding
    is_bundled = any(argument.startswith("--tokenizer.encoding=tokenizer/") for argument in job.arguments)
    if not is_bundled and "tokenizer.encoding" not in mounted and not _is_encoding(encoding):
        yield (
            f"tokenizer.encoding = {encoding!r}: no such file; create it, or add --channel "
            "tokenizer.encoding=s3://BUCKET/FILE"
        )
    if job.spot and recipe.checkpoint.resume_from:
        yield (
            f"checkpoint.resume_from = {recipe.checkpoint.resume_from}: a job that was interrupted would go back to that step; "
            "omit --spot"
        )
    for override in job.arguments[1:]:
        key = override.partition("=")[0].removeprefix("--")
        if key in ("run.dir", "run.name", "checkpoint.dir"):
            option = "--checkpoints" if key == "checkpoint.dir" else "--run"
            yield f"{override}: the job sets this key itself; use {option} instead"


def _is_encoding(name: str) -> bool:
    """Whether a tokenizer is built in. Without tiktoken, every name that is no path may be."""
    if importlib.util.find_spec("tiktoken") is None:
        return "/" not in name and not name.endswith((".json", ".model"))
    import tiktoken

    return name in ("bytes", *tiktoken.list_encoding_names())


def _simulate(options: argparse.Namespace, request: dict[str, Any], bundle: Bundle) -> int:
    from titanlike.tools.clusters.sagemaker.simulate import Simulation

    simulation = Simulation(request, bundle, options.folder, options.processes)

    def stop(number: int, _: object) -> None:
        signal.signal(number, lambda *_: simulation.kill())
        print("stopping as SageMaker stops a job: the run saves and exits; repeat to kill it", file=sys.stderr)
        simulation.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    results = simulation.wait()
    print("\n".join(map(str, results)))
    return next((result.code for result in results if result.code), 0)


def _configured_region() -> str:
    """Returns the region of the user's AWS configuration, if botocore is installed."""
    try:
        import botocore.session
    except ImportError:
        return ""
    return botocore.session.Session().get_config_variable("region") or ""
