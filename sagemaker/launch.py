"""Send a recipe to SageMaker as a job, look at what that would be first, or run the same job here.

python sagemaker/launch.py train_configs/llama3_8b_float8.toml --instances 4 --dry-run
"""

import argparse
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

try:
    import pydantic  # noqa: F401
    import tomli  # noqa: F401
except ImportError as error:
    repository = Path(__file__).resolve().parents[1]
    print(f"error: {sys.executable} lacks {error.name}; run: pip install -e {repository}", file=sys.stderr)
    sys.exit(2)

from machines import machine_named
from parcel import Parcel, pack
from report import report
from request import STAMP, Channel, Job, problems, request_for

from titanlike.config import PretrainRecipe, UserError
from titanlike.environment import fail
from titanlike.start import Arguments

COMMANDS = ("list", "logs", "wait", "stop", "describe", "resume")
ABOUT = """\
Sends a recipe to SageMaker. Everything after the recipe that is not an option here is an override, as with ./run_train.sh.

  python sagemaker/launch.py RECIPE.toml --instances 4 --dry-run     what would be sent, what it costs; asks nobody
  python sagemaker/launch.py RECIPE.toml --instances 2 --simulate    the same job, here: hosts on loopback
  python sagemaker/launch.py RECIPE.toml --smoke                     a few minutes on one instance, before the expensive one
  python sagemaker/launch.py RECIPE.toml --instances 4 --wait        send it, and watch it
  python sagemaker/launch.py list | describe JOB | logs JOB | wait JOB | stop JOB
  python sagemaker/launch.py resume RUN                              the next job of a run, from its newest checkpoint"""

ACCOUNT = "763104351884"  # of AWS's own images, in these regions
REGIONS = {
    "ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "ca-central-1", "eu-central-1",
    "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3", "sa-east-1", "us-east-1", "us-east-2", "us-west-1", "us-west-2",
}  # fmt: skip
IMAGES = {
    "2.11": "2.11-cu130-amzn2023-sagemaker",
    "2.12": "2.12-cu130-amzn2023-sagemaker",
    "2.13": "2.13-cu133-amzn2023-sagemaker",
}
# Keys that name something on a machine's disk, and what of them a job can be given as a channel.
PLACES = ("data.path", "data.mixture", "data.validation_path", "tokenizer.encoding", "compile.cache")
# What a dry run says for what only an account can tell.
SOMEBODY = "arn:aws:iam::123456789012:role/YOUR-ROLE"
SOMEWHERE = "your-bucket"


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python sagemaker/launch.py",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="the recipe")
    what = parser.add_argument_group("what to do, if not to send the job")
    what.add_argument("--dry-run", action="store_true", help="print the request, the files, the cost; needs no account")
    what.add_argument("--simulate", action="store_true", help="run the job here, its hosts on loopback, on the CPU")
    what.add_argument(
        "--smoke", action="store_true", help="one instance: driver, EFA, all-reduce, 20 steps of the recipe"
    )
    what.add_argument("--json", action="store_true", help="with --dry-run: the request alone")
    what.add_argument("--wait", action="store_true", help="after sending: show logs until it ends")
    where = parser.add_argument_group("the machines")
    where.add_argument("--instances", type=_count, default=1, metavar="N", help="machines (1)")
    where.add_argument("--instance-type", default="ml.p5.48xlarge", metavar="TYPE", help="their kind (ml.p5.48xlarge)")
    where.add_argument("--torch", choices=IMAGES, default="2.13", help="AWS's image with this torch (2.13)")
    where.add_argument("--image", default="", metavar="URI", help="another image")
    where.add_argument(
        "--spot", action="store_true", help="spot capacity: cheaper, taken away now and then, and gone on with"
    )
    where.add_argument("--max-hours", type=_hours, default=24.0, metavar="H", help="longest time of the job (24)")
    where.add_argument("--wait-hours", type=_hours, default=24.0, metavar="H", help="besides, for spot capacity (24)")
    where.add_argument(
        "--volume-gb", type=_count, default=200, metavar="N", help="disk of a machine that has none (200)"
    )
    where.add_argument(
        "--keep-alive", type=_count, default=0, metavar="MINUTES", help="keep the machines for a next job"
    )
    where.add_argument("--training-plan", default="", metavar="ARN", help="reserved capacity")
    where.add_argument("--retries", type=_count, default=0, metavar="N", help="starts after failures of the service")
    account = parser.add_argument_group("the account")
    account.add_argument(
        "--run", default="", metavar="NAME", help="the run, which several jobs may go on with (RECIPE)"
    )
    account.add_argument("--region", default="", help="(AWS_REGION, or as your configuration says)")
    account.add_argument("--role", default="", metavar="ARN", help="the job's role (SAGEMAKER_ROLE)")
    account.add_argument("--bucket", default="", help="for code, checkpoints, metrics (sagemaker-REGION-ACCOUNT)")
    account.add_argument("--prefix", default="titanlike", help="of names in S3 and of jobs (titanlike)")
    account.add_argument("--subnet", action="append", default=[], metavar="ID", help="of a VPC; several times")
    account.add_argument("--security-group", action="append", default=[], metavar="ID", help="of a VPC; several times")
    account.add_argument("--kms-key", default="", metavar="ID", help="encrypts disks and output")
    account.add_argument("--tag", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="several times")
    account.add_argument("--env", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="several times")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--channel", action="append", default=[], type=_pair, metavar="KEY=ADDRESS",
        help="for a key of the recipe such as data.path: s3://BUCKET/PREFIX, copied before the start (or with ,FastFile at "
        "its end, read as it goes), or fsx://FILESYSTEM/MOUNT/FOLDER; several times",
    )  # fmt: skip
    data.add_argument("--checkpoints", default="", metavar="fsx://...", help="keep checkpoints on FSx instead of S3")
    cost = parser.add_argument_group("what a dry run reckons with")
    cost.add_argument("--price", type=_dollars, metavar="DOLLARS", help="of one machine, an hour")
    cost.add_argument("--tokens-per-second", type=_dollars, metavar="N", help="of one GPU, as you expect")
    cost.add_argument("--measured", type=Path, metavar="FILE", help="the metrics.jsonl of a former run, for the same")
    local = parser.add_argument_group("a simulation")
    local.add_argument(
        "--folder", type=Path, default=Path("runs/sagemaker"), help="what stands in for S3 (runs/sagemaker)"
    )
    local.add_argument("--processes", type=_count, default=1, metavar="N", help="processes of a host (1)")
    return parser


def main() -> None:
    """Do what this command line says."""
    words = sys.argv[1:]
    try:
        if words and words[0] in COMMANDS:
            from jobs import command

            sys.exit(command(words))
        options, rest = build_parser().parse_known_args(words)
        overrides = Arguments(rest).overrides
        _refuse_unknown(overrides)
        sys.exit(launch(options, overrides))
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


def _refuse_unknown(overrides: dict[str, str]) -> None:
    """A word without a dot is meant for this command line, not for a recipe."""
    from titanlike.config.load import nearest

    known = [word for action in build_parser()._actions for word in action.option_strings]
    for name in overrides:
        if "." not in name and name != "recipe":
            near = nearest(f"--{name}", known)
            raise UserError(
                f"--{name}: there is no such option; " + (f"did you mean {near}?" if near else "see --help")
            )


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


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _hours(text: str) -> float:
    return _number(text, "hours")


def _dollars(text: str) -> float:
    return _number(text, "units")


def _number(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text} is not a number of {unit}")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text}: give NAME=VALUE")
    return name, value


if __name__ == "__main__":
    main()
