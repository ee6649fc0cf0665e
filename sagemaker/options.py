"""The options of `launch.py`, and what each may be."""

import argparse
from pathlib import Path

ABOUT = """\
Sends a recipe to SageMaker. Everything after the recipe that is not an option here is an override, as with ./run_train.sh.

  python sagemaker/launch.py RECIPE.toml --instances 4 --dry-run     what would be sent, what it costs; asks nobody
  python sagemaker/launch.py RECIPE.toml --instances 2 --simulate    the same job, here: hosts on loopback
  python sagemaker/launch.py RECIPE.toml --smoke                     a few minutes on one instance, before the expensive one
  python sagemaker/launch.py RECIPE.toml --instances 4 --wait        send it, and watch it
  python sagemaker/launch.py list | describe JOB | logs JOB | wait JOB | stop JOB
  python sagemaker/launch.py resume RUN                              the next job of a run, from its newest checkpoint"""

IMAGES = {
    "2.11": "2.11-cu130-amzn2023-sagemaker",
    "2.12": "2.12-cu130-amzn2023-sagemaker",
    "2.13": "2.13-cu133-amzn2023-sagemaker",
}


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python sagemaker/launch.py",
        usage="python sagemaker/launch.py RECIPE.toml [options] [--section.key=value ...]",
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
