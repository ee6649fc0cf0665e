"""The options of `launch.py`."""

import argparse
from pathlib import Path
from typing import Any

from request import PREFIX

from titanlike.tools.arguments import positive_int

DESCRIPTION = """\
Submits a recipe to SageMaker. Arguments after the recipe that are not listed below are overrides, as with ./run_train.sh.

  python sagemaker/launch.py RECIPE.toml --instances 4 --dry-run     print the request and its cost; contacts no service
  python sagemaker/launch.py RECIPE.toml --instances 2 --simulate    run the same job locally, with one process per host
  python sagemaker/launch.py RECIPE.toml --smoke                     a few minutes on one instance, before a large job
  python sagemaker/launch.py RECIPE.toml --instances 4 --wait        submit and monitor it
  python sagemaker/launch.py list | describe JOB | logs JOB | wait JOB | stop JOB
  python sagemaker/launch.py resume RUN                              submit the next job of a run, from its newest checkpoint"""

IMAGES = {
    "2.11": "2.11-cu130-amzn2023-sagemaker",
    "2.12": "2.12-cu130-amzn2023-sagemaker",
    "2.13": "2.13-cu133-amzn2023-sagemaker",
}
REPEATABLE: Any = {"action": "append", "default": []}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser. Names in the namespace are those of `request.Job`."""
    parser = argparse.ArgumentParser(
        prog="python sagemaker/launch.py",
        usage="python sagemaker/launch.py RECIPE.toml [options] [--section.key=value ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="the recipe")
    add = parser.add_argument_group("mode (default: submit the job)").add_argument
    add("--dry-run", action="store_true", help="print the request, files and cost; needs no account")
    add("--simulate", action="store_true", help="run the job locally on the CPU, with hosts on loopback")
    add("--smoke", action="store_true", help="one instance: check driver, EFA and all-reduce, train 20 steps")
    add("--json", action="store_true", help="with --dry-run: print only the request")
    add("--wait", action="store_true", help="after submitting: print logs until the job ends")
    add = parser.add_argument_group("instances").add_argument
    add("--instances", dest="num_instances", type=positive_int, default=1, metavar="N", help="number of instances (1)")
    add("--instance-type", default="ml.p5.48xlarge", metavar="TYPE", help="instance type (ml.p5.48xlarge)")
    add("--torch", choices=IMAGES, default="2.13", help="AWS image with this version of torch (2.13)")
    add("--image", default="", metavar="URI", help="another image")
    add("--spot", action="store_true", help="spot instances: cheaper; the job resumes after an interruption")
    add("--max-hours", type=_positive_float, default=24.0, metavar="H", help="maximum duration of the job (24)")
    add("--wait-hours", type=_positive_float, default=24.0, metavar="H", help="maximum wait for spot capacity (24)")
    add("--volume-gb", type=positive_int, default=200, metavar="N", help="disk of instance types without one (200)")
    add("--keep-alive", type=positive_int, default=0, metavar="MINUTES", help="use a warm pool, kept for the next job")
    add("--training-plan", default="", metavar="ARN", help="reserved capacity")
    add("--retries", type=positive_int, default=0, metavar="N", help="restarts after internal errors of SageMaker")
    add = parser.add_argument_group("account").add_argument
    senders = "ModelTrainer of SageMaker SDK v3, PyTorch estimator of SDK v2, or boto3 (the first installed)"
    add("--sender", choices=["modeltrainer", "estimator", "boto3"], default="", help=senders)
    add("--run", default="", metavar="NAME", help="name of the run, which later jobs resume (name of the recipe)")
    add("--region", default="", help="(AWS_REGION, or the configured region)")
    add("--role", default="", metavar="ARN", help="IAM role of the job (SAGEMAKER_ROLE)")
    add("--bucket", default="", help="for code, checkpoints, metrics (SAGEMAKER_BUCKET, or sagemaker-REGION-ACCOUNT)")
    add("--prefix", default=PREFIX, help=f"prefix of S3 keys and job names ({PREFIX})")
    add("--subnet", dest="subnets", metavar="ID", help="of a VPC; repeatable", **REPEATABLE)
    add("--security-group", dest="security_groups", metavar="ID", help="of the VPC; repeatable", **REPEATABLE)
    add("--kms-key", default="", metavar="ID", help="key to encrypt code and output; instances encrypt their own disks")
    add("--tag", dest="tags", metavar="NAME=VALUE", type=_pair, help="tag of the job; repeatable", **REPEATABLE)
    add("--env", dest="environment", metavar="NAME=VALUE", type=_pair, help="variable; repeatable", **REPEATABLE)
    add = parser.add_argument_group("data").add_argument
    add(
        "--channel", dest="channels", metavar="KEY=URI", type=_pair, **REPEATABLE,
        help="data for a recipe key such as data.path: s3://BUCKET/PREFIX, copied before the start (with the suffix ,FastFile: "
        "streamed), or fsx://FILESYSTEM/MOUNT/FOLDER; repeatable",
    )  # fmt: skip
    add("--checkpoints", default="", metavar="fsx://...", help="write checkpoints to FSx instead of S3")
    add = parser.add_argument_group("cost estimate of --dry-run").add_argument
    add("--price", type=_positive_float, metavar="DOLLARS", help="price of one instance per hour")
    add("--tokens-per-second", type=_positive_float, metavar="N", help="expected throughput per GPU")
    add("--measured", type=Path, metavar="FILE", help="metrics.jsonl of an earlier run, to take the throughput from")
    add = parser.add_argument_group("--simulate").add_argument
    add("--folder", type=Path, default=Path("runs/sagemaker"), help="replaces S3 (runs/sagemaker)")
    add("--processes", type=positive_int, default=1, metavar="N", help="processes per host (1)")
    return parser


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value
