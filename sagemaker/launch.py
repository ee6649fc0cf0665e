"""Send a recipe to SageMaker as a job, look at what that would be first, or run the same job here.

python sagemaker/launch.py train_configs/llama3_8b_float8.toml --instances 4 --dry-run
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the library beside this folder

missing = [name for name in ("pydantic", "tomli") if importlib.util.find_spec(name) is None]
if missing:
    repository = Path(__file__).resolve().parents[1]
    print(f"error: {sys.executable} lacks {', '.join(missing)}; run: pip install -e {repository}", file=sys.stderr)
    sys.exit(2)

from limits import problems
from machines import machine_named
from options import IMAGES, build_parser
from parcel import Parcel, pack
from report import report
from request import STAMP, Channel, Job, request_for

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.load import nearest
from titanlike.distributed.environment import fail
from titanlike.run.start import Arguments

COMMANDS = ("list", "logs", "wait", "stop", "describe", "resume")
ACCOUNT = "763104351884"  # of AWS's own images, in these regions
REGIONS = {
    "ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "ca-central-1", "eu-central-1",
    "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3", "sa-east-1", "us-east-1", "us-east-2", "us-west-1", "us-west-2",
}  # fmt: skip
# Keys that name something on a machine's disk, and what of them a job can be given as a channel.
PLACES = ("data.path", "data.mixture", "data.validation_path", "tokenizer.encoding", "compile.cache")
# What a dry run says for what only an account can tell.
SOMEBODY = "arn:aws:iam::123456789012:role/YOUR-ROLE"
SOMEWHERE = "your-bucket"


def main() -> None:
    """Do what this command line says."""
    words = sys.argv[1:]
    try:
        if words and words[0] in COMMANDS:
            from jobs import command

            sys.exit(command(words))
        options, rest = build_parser().parse_known_args(words)
        _refuse_unknown(options.recipe, rest)
        sys.exit(launch(options, Arguments(rest).overrides))
    except UserError as error:
        fail(error)


def launch(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Look at everything that can be looked at here; then print it, run it here, or send it."""
    begun = time.time()
    machine = machine_named(options.instance_type)
    instances = 1 if options.smoke else options.instances
    processes = options.processes if options.simulate else machine.num_gpus
    words = [f"--{key}={value}" for key, value in overrides.items()]
    parcel = pack(Path(options.recipe), words, instances * processes, s3=not options.simulate)
    job = _job(options, parcel, time.strftime(STAMP, time.localtime(begun)))
    found = [*_path_problems(parcel.recipe, job), *problems(job)]
    if found:
        raise UserError("\n".join(found))
    request = request_for(job)
    if options.simulate:
        return _simulate(options, request, parcel)
    if options.dry_run:
        text = report(options, job, request, parcel)
        print(json.dumps(request, indent=2) if options.json else text)
        return 0
    return _send(options, job, parcel)


def _send(options: argparse.Namespace, job: Job, parcel: Parcel) -> int:
    """Ask the account what only it knows, then send the job."""
    from sent import line, running
    from service import clients, plainly
    from upload import own_bucket, refuse_bucket, send

    asked = clients(job.region)
    with plainly(asked.region):
        if job.bucket == SOMEWHERE:
            job = replace(job, bucket=own_bucket(asked))
        refuse_bucket(asked, job.bucket)
        busy = running(asked, job.run, job.prefix)
        if busy:
            raise UserError(
                f"the run {job.run} is still trained by {busy.name}: {line('wait', busy.name, asked.region)}; for another run "
                "give --run another name"
            )
        name = send(asked, job, request_for(job), parcel, print)
    if options.wait:
        from watching import wait

        return wait(asked, name)
    print(f"to watch it: {line('wait', name, asked.region)}")
    return 0


def _job(options: argparse.Namespace, parcel: Parcel, stamp: str) -> Job:
    """What the options come to, completed from the environment."""
    asked = options.dry_run or options.simulate
    region = options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _configured()
    if not region and not asked:
        raise UserError("--region is missing, and neither AWS_REGION nor your AWS configuration names one")
    region = region or "us-east-1"
    role = options.role or os.environ.get("SAGEMAKER_ROLE", "")
    if not role and not asked:
        raise UserError(
            f"--role is missing: the ARN of a role for the job, such as {SOMEBODY} (docs/sagemaker.md says which)"
        )
    image = options.image or f"{ACCOUNT}.dkr.ecr.{region}.amazonaws.com/pytorch:{IMAGES[options.torch]}"
    if not options.image and region not in REGIONS and not options.simulate:
        raise UserError(f"--region {region}: AWS's image lies in another account there; give its address as --image")
    kept = options.checkpoints
    if kept and not kept.startswith("fsx://"):
        raise UserError(f"--checkpoints {kept}: give fsx://FILESYSTEM/MOUNT/FOLDER; without it they go to S3")
    run = options.run or Path(options.recipe).stem
    return Job(
        run=f"{run}-smoke" if options.smoke else run,
        stamp=stamp,
        words=parcel.words,
        machine=machine_named(options.instance_type),
        instances=1 if options.smoke else options.instances,
        region=region,
        role=role or SOMEBODY,
        bucket=options.bucket or os.environ.get("SAGEMAKER_BUCKET", "") or SOMEWHERE,
        image=image,
        prefix=options.prefix,
        channels=_channels(options.channel),
        checkpoints=Channel("checkpoints", kept, writes=True) if kept else None,
        spot=options.spot,
        max_hours=0.5 if options.smoke else options.max_hours,
        wait_hours=options.wait_hours,
        volume_gb=options.volume_gb,
        keep_alive_minutes=options.keep_alive,
        training_plan=options.training_plan,
        retries=options.retries,
        subnets=tuple(options.subnet),
        security_groups=tuple(options.security_group),
        kms_key=options.kms_key,
        tags=dict(options.tag),
        environment=dict(options.env),
        smoke=options.smoke,
    )


def _channels(given: Sequence[tuple[str, str]]) -> tuple[Channel, ...]:
    channels = []
    keys = [key for key, _ in given]
    for index, (key, text) in enumerate(given):
        address, _, mode = text.partition(",")
        if key not in PLACES:
            raise UserError(f"--channel {key}={text}: give one of the keys {', '.join(PLACES)}")
        if keys.count(key) > 1 and key != "data.mixture":
            raise UserError(f"--channel {key} is given twice; several are for data.mixture")
        if mode not in ("", "File", "FastFile"):
            raise UserError(f"--channel {key}={text}: {mode} is no way to read; use File or FastFile")
        if not address.startswith(("s3://", "fsx://")):
            raise UserError(f"--channel {key}={text}: give s3://BUCKET/PREFIX or fsx://FILESYSTEM/MOUNT/FOLDER")
        number = keys[: index + 1].count(key) if key == "data.mixture" else 0
        channels.append(Channel(key, address, mode or "File", number))
    return tuple(channels)


def _path_problems(recipe: PretrainRecipe, job: Job) -> list[str]:
    """Paths of this machine that the job would look for in vain, and keys that the job has values of its own for."""
    given = {channel.key for channel in job.channels}
    found = []
    data = recipe.data
    paths = {
        "data.path": [data.path],
        "data.mixture": list(data.mixture),
        "data.validation_path": [data.validation_path],
    }
    for key, values in paths.items():
        local = [value for value in values if value and "://" not in value]
        if data.source in ("shards", "text", "stream") and local and key not in given:
            found.append(
                f"{key} = {local[0]!r} is a path of this machine, which the job does not see: copy it to S3 (aws s3 sync "
                f"{local[0]} s3://BUCKET/{Path(local[0]).name}) and add --channel {key}=s3://BUCKET/{Path(local[0]).name}"
            )
    encoding = recipe.tokenizer.encoding
    is_file = "/" in encoding or encoding.endswith((".json", ".model"))
    if is_file and not Path(encoding).is_file() and "tokenizer.encoding" not in given:
        found.append(
            f"tokenizer.encoding = {encoding!r}: there is no such file here to send along; put it there, or add "
            "--channel tokenizer.encoding=s3://BUCKET/FILE"
        )
    for word in job.words[1:]:
        key = word.partition("=")[0].removeprefix("--")
        if key in ("run.dir", "run.name", "checkpoint.dir"):
            other = "--checkpoints" if key == "checkpoint.dir" else "--run"
            found.append(f"{word}: on SageMaker the job has its own place for this; use {other} to choose it")
    return found


def _refuse_unknown(recipe: str, words: Sequence[str]) -> None:
    """A word without a dot is meant for this command line, not for a recipe."""
    if "." not in recipe:
        near = nearest(recipe, COMMANDS)
        raise UserError(
            f"{recipe}: there is no such command, nor such a recipe; "
            + (f"did you mean {near}?" if near else "see --help")
        )
    known = [option for action in build_parser()._actions for option in action.option_strings]
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and "." not in name and name != "--recipe":
            near = nearest(name, known)
            raise UserError(f"{name}: there is no such option; " + (f"did you mean {near}?" if near else "see --help"))


def _simulate(options: argparse.Namespace, request: dict[str, Any], parcel: Parcel) -> int:
    from simulate import Simulation, summary

    simulation = Simulation(request, parcel, options.folder, options.processes)

    def stop(number: int, frame: object) -> None:
        signal.signal(number, lambda *_: simulation.end())
        print("stopping, as SageMaker stops a job: it saves and leaves; again to end it at once", file=sys.stderr)
        simulation.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    ended = simulation.wait()
    print("\n".join(summary(ended)))
    return next((one.code for one in ended if one.code), 0)


def _configured() -> str:
    """The region of the user's AWS configuration, if botocore is there to read it."""
    try:
        import botocore.session
    except ImportError:
        return ""
    return botocore.session.Session().get_config_variable("region") or ""


if __name__ == "__main__":
    main()
