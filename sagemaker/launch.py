"""Submits a recipe to SageMaker as a training job, shows the job before it is submitted, or runs it locally.

python sagemaker/launch.py train_configs/llama3_8b_float8.toml --instances 4 --dry-run
"""

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

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(REPOSITORY))  # for `titanlike`, which need not be installed

missing = [name for name in ("pydantic", "tomli") if importlib.util.find_spec(name) is None]
if missing:
    print(f"error: {sys.executable} lacks {', '.join(missing)}; run: pip install -e {REPOSITORY}", file=sys.stderr)
    sys.exit(2)

import jobs
from bundle import Bundle, make_bundle
from entry import SMOKE_OVERRIDES
from instances import find_instance_type
from options import IMAGES, build_parser
from report import report
from request import TIMESTAMP, Channel, Job, request_for, with_job_keys
from service import NO_REGION
from validation import job_errors

from titanlike.config import UserError
from titanlike.config.base import nearest, shown
from titanlike.config.distill import RANDOM
from titanlike.distributed.command_line import command_line
from titanlike.distributed.environment import fail
from titanlike.recipe import PretrainRecipe
from titanlike.run.start import Arguments, name_of

IMAGE_ACCOUNT = "763104351884"  # hosts the AWS images in these regions
REGIONS = {
    "ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "ca-central-1", "eu-central-1",
    "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3", "sa-east-1", "us-east-1", "us-east-2", "us-west-1", "us-west-2",
}  # fmt: skip
CHANNEL_KEYS = (
    "data.path", "data.mixture", "data.validation_path", "tokenizer.encoding", "checkpoint.initial", "distillation.teacher",
)  # fmt: skip
# Options that have another name in the SageMaker SDK or in other launchers.
SDK_NAMES = {
    "instance_count": "--instances", "num_instances": "--instances", "num_nodes": "--instances", "nodes": "--instances",
    "image_uri": "--image", "use_spot_instances": "--spot", "max_run": "--max-hours", "max_wait": "--wait-hours",
    "volume_size": "--volume-gb", "keep_alive_period_in_seconds": "--keep-alive", "base_job_name": "--run", "role_arn": "--role",
}  # fmt: skip
# Placeholders in a request that is not sent.
EXAMPLE_ROLE = "arn:aws:iam::123456789012:role/YOUR-ROLE"
EXAMPLE_BUCKET = "your-bucket"


@command_line()
def main() -> None:
    """Executes the command line."""
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in jobs.COMMANDS:
            sys.exit(jobs.run(arguments))
        options, rest = build_parser().parse_known_args(arguments)
        _refuse_unknown(options.recipe, rest)
        sys.exit(launch(options, Arguments([options.recipe, *rest]).overrides))
    except UserError as error:
        fail(error)


def launch(options: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    """Checks everything that can be checked locally, then prints, simulates or submits the job. Returns the exit code."""
    timestamp = time.strftime(TIMESTAMP)
    instance_type = find_instance_type(options.instance_type)
    num_instances = 1 if options.smoke else options.num_instances
    processes = options.processes if options.simulate else instance_type.num_gpus
    job = make_job(options, timestamp)
    smoke = dict(override.removeprefix("--").split("=") for override in SMOKE_OVERRIDES if options.smoke)
    bundle = make_bundle(
        Path(options.recipe),
        overrides,
        num_instances * processes,
        job_keys=lambda values: with_job_keys(job, {**values, **smoke}),
        s3=not options.simulate,
    )
    job = replace(job, arguments=bundle.arguments)
    if errors := [*recipe_errors(bundle.recipe, job), *job_errors(job)]:
        raise UserError("\n".join(errors))
    if options.simulate:
        return _simulate(options, request_for(job), bundle)
    if options.dry_run:
        request = request_for(job)
        text = report(options, job, request, bundle)
        print(json.dumps(request, indent=2) if options.json else text)
        return 0
    return _submit(options, job, bundle)


def _submit(options: argparse.Namespace, job: Job, bundle: Bundle) -> int:
    from service import make_clients
    from submit import select_sender, upload_and_submit

    sender = select_sender(options.sender)
    clients = make_clients(job.region)
    if job.bucket == EXAMPLE_BUCKET:
        job = replace(job, bucket=clients.default_bucket())
    return jobs.after_submit(clients, upload_and_submit(clients, job, bundle, sender), wait=options.wait)


def make_job(options: argparse.Namespace, timestamp: str) -> Job:
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
    settings = {field.name: getattr(options, field.name) for field in fields(Job) if hasattr(options, field.name)}
    settings |= {
        "run": options.run or name_of(Path(options.recipe).stem),
        "timestamp": timestamp,
        "arguments": [],
        "instance_type": find_instance_type(options.instance_type),
        "region": region,
        "role": role or EXAMPLE_ROLE,
        "bucket": bucket_of(options) or EXAMPLE_BUCKET,
        "image": options.image or f"{IMAGE_ACCOUNT}.dkr.ecr.{region}.amazonaws.com/pytorch:{IMAGES[options.torch]}",
        "channels": parse_channels(options.channels),
        "checkpoints": Channel("checkpoints", checkpoints, writable=True) if checkpoints else None,
        "tags": dict(options.tags),
        "environment": dict(options.environment),
    }
    if options.smoke:
        settings |= {"run": f"{settings['run']}-smoke", "num_instances": 1, "max_hours": 0.5}
    return Job(**settings)


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


def recipe_errors(recipe: PretrainRecipe, job: Job) -> Iterator[str]:
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


def _refuse_unknown(recipe: str, arguments: Sequence[str]) -> None:
    """Refuses misspelt commands and options: an argument without a dot is not an override."""
    if "." not in recipe:
        match = nearest(recipe, list(jobs.COMMANDS))
        hint = f"did you mean {match}?" if match else "see --help"
        raise UserError(f"{shown(recipe)}: no such command or recipe; {hint}")
    options = {option: option for action in build_parser()._actions for option in action.option_strings}
    options |= {f"--{name.replace('_', '-')}": option for name, option in SDK_NAMES.items()}
    for argument in arguments:
        name = argument.partition("=")[0]
        if argument.startswith("--") and "." not in name and name not in ("--recipe", "--program"):
            match = nearest(name, list(options))
            raise UserError(
                f"{shown(name)}: unknown option; " + (f"did you mean {options[match]}?" if match else "see --help")
            )


def _simulate(options: argparse.Namespace, request: dict[str, Any], bundle: Bundle) -> int:
    from simulate import Simulation

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


if __name__ == "__main__":
    main()
