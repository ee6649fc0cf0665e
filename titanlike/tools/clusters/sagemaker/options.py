"""The options of SageMaker jobs."""

import argparse
from pathlib import Path
from typing import Any

from titanlike.tools.arguments import positive_int
from titanlike.tools.clusters.sagemaker.request import PREFIX

IMAGES = {
    "2.11": "2.11-cu130-amzn2023-sagemaker",
    "2.12": "2.12-cu130-amzn2023-sagemaker",
    "2.13": "2.13-cu133-amzn2023-sagemaker",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of SageMaker to those of all launchers. Names in the namespace are the names of `TrainingJob`'s fields."""
    repeatable: Any = {"action": "append", "default": []}
    add = parser.add_argument_group("mode (default: submit the job)").add_argument
    add("--simulate", action="store_true", help="run the job locally on the CPU, with hosts on loopback")
    add("--doctor", action="store_true", help="instead of training, run `titanlike doctor`, also with --network")
    add = parser.add_argument_group("instances").add_argument
    add("--instance-type", default="ml.p5.48xlarge", metavar="TYPE", help="instance type")
    add("--torch", choices=IMAGES, default="2.13", help="AWS image with this version of torch")
    add("--image", default="", metavar="URI", help="another image")
    add("--spot", action="store_true", help="use spot instances: cheaper; the job resumes after an interruption")
    add("--max-hours", type=_positive_float, default=24.0, metavar="H", help="maximum duration of the job")
    add("--wait-hours", type=_positive_float, default=24.0, metavar="H", help="maximum wait for spot capacity")
    add("--volume-gb", type=positive_int, default=200, metavar="N", help="disk of instances without one of their own")
    add(
        "--keep-alive",
        type=positive_int,
        default=0,
        metavar="MINUTES",
        help="minutes to keep the instances for the next job",
    )
    add("--training-plan", default="", metavar="ARN", help="training plan with reserved capacity")
    add("--retries", type=positive_int, default=0, metavar="N", help="restarts after internal errors of SageMaker")
    add = parser.add_argument_group("account").add_argument
    text = "ModelTrainer of SageMaker SDK v3, PyTorch estimator of SDK v2, or boto3 (default: the first installed)"
    add("--sender", choices=["modeltrainer", "estimator", "boto3"], default="", help=text)
    text = "name of the run, which later jobs resume (default: name of the recipe)"
    add("--run", dest="run_name", default="", metavar="NAME", help=text)
    add("--region", default="", metavar="NAME", help="region (default: AWS_REGION, or the configured one)")
    add("--role", default="", metavar="ARN", help="IAM role of the job (default: SAGEMAKER_ROLE)")
    text = "bucket for code, checkpoints and metrics (default: SAGEMAKER_BUCKET, or sagemaker-REGION-ACCOUNT)"
    add("--bucket", default="", metavar="NAME", help=text)
    add("--prefix", default=PREFIX, metavar="NAME", help="prefix of S3 keys and job names")
    add("--subnet", dest="subnets", metavar="ID", help="subnet of a VPC", **repeatable)
    add("--security-group", dest="security_groups", metavar="ID", help="security group of the VPC", **repeatable)
    add("--kms-key", default="", metavar="ID", help="key to encrypt code and output; instances encrypt their own disks")
    add("--tag", dest="tags", metavar="NAME=VALUE", type=_pair, help="tag of the job", **repeatable)
    text = "variable of the container"
    add("--env", dest="environment", metavar="NAME=VALUE", type=_pair, help=text, **repeatable)
    add = parser.add_argument_group("data").add_argument
    text = (
        "data for a recipe key such as data.path: s3://BUCKET/PREFIX, copied before the start (with the suffix ,FastFile: "
        "streamed), or fsx://FILESYSTEM/MOUNT/FOLDER"
    )
    add("--channel", dest="channels", metavar="KEY=URI", type=_pair, help=text, **repeatable)
    add("--checkpoints", default="", metavar="fsx://...", help="write checkpoints to FSx instead of S3")
    add = parser.add_argument_group("--simulate").add_argument
    text = "folder in place of S3"
    add("--folder", type=Path, default=Path("runs/sagemaker"), metavar="FOLDER", help=text)
    add("--processes", type=positive_int, default=1, metavar="N", help="processes of a host")


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
