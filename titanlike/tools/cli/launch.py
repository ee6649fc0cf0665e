"""`titanlike launch`: a recipe as a job of Slurm, Kubernetes, SkyPilot or SageMaker, or as a container image."""

import argparse
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.run.start import Arguments
from titanlike.tools.arguments import positive_int
from titanlike.tools.cli.command import OVERRIDE_TEXT, RECIPE_KEYS, add_command
from titanlike.tools.clusters import cluster_job, docker, kubernetes, skypilot, slurm
from titanlike.tools.clusters.cluster_job import ClusterJob
from titanlike.tools.clusters.sagemaker import options
from titanlike.tools.planning.hardware import DEFAULT_HARDWARE

DESCRIPTION = """\
Submits a recipe to Slurm, Kubernetes, SkyPilot or SageMaker, or builds a container image. Checks the recipe first for all processes
of the job, as a run does. The run's name is fixed, so that a job that is preempted, requeued or submitted again resumes the run.

  titanlike launch slurm llama3_8b --nodes 4 --time 24:00:00 --sbatch=--partition=gpu
  titanlike launch kubernetes llama3_8b --nodes 4 --image registry/titanlike:1 --claim training
  titanlike launch kubernetes llama3_8b --nodes 4 --image ECR/titanlike:1 --claim fsx --kind hyperpod --hardware ml.p5.48xlarge
  titanlike launch skypilot llama3_8b --nodes 2 --spot --checkpoint.dir=gs://bucket/runs
  titanlike launch sagemaker llama3_8b --nodes 4 --role ARN --channel data.path=s3://bucket/tokens
  titanlike launch docker llama3_8b --image registry/titanlike:1

--dry-run submits nothing: it writes the files or, for SageMaker, prints the request."""

KINDS = {"jobset": kubernetes.job_set, "trainjob": kubernetes.train_job, "hyperpod": kubernetes.hyperpod_job}
TIME_LIMIT = r"(\d+-)?\d+(:\d\d){0,2}"  # of Slurm: minutes, hours:minutes:seconds, days-hours


def add(commands: Any) -> None:
    """Adds `launch` to the commands of `titanlike`."""
    parser = add_command(commands, "launch", DESCRIPTION)
    targets = parser.add_subparsers(dest="target", required=True, metavar="slurm|kubernetes|skypilot|sagemaker|docker")
    for target, run, description in (
        ("slurm", _slurm, "Writes a batch file and submits it with sbatch."),
        (
            "kubernetes",
            _kubernetes,
            "Writes the manifests of a JobSet, a Kubeflow TrainJob or a job of SageMaker HyperPod and applies them with kubectl.",
        ),
        ("skypilot", _skypilot, "Writes the task of a managed job and submits it with sky."),
        ("sagemaker", _sagemaker, "Uploads the library and the recipe to S3 and submits a training job of SageMaker."),
        ("docker", _docker, "Writes a Dockerfile with the wheel and the recipe and builds the image."),
    ):
        command = add_command(targets, target, description, run, overrides=RECIPE_KEYS)
        command.add_argument("recipe", metavar="RECIPE", help=f"recipe; {OVERRIDE_TEXT}")
        command.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="number of nodes")
        text = f"hardware of the plan that is printed (default: metrics.hardware of the recipe, or {DEFAULT_HARDWARE})"
        if target == "kubernetes":
            text += "; its interfaces of EFA are requested, and --kind hyperpod selects nodes of an instance type"
        if target == "slurm":
            text += "; several nodes with EFA require it (FI_PROVIDER)"
        if target == "sagemaker":
            text = "hardware of an instance type that is not known (default: the instance type)"
        command.add_argument("--hardware", default="", metavar="NAME|FILE", help=text)
        command.add_argument("--dry-run", action="store_true", help="submit nothing")
        if target == "sagemaker":  # its instance types have the other options' values
            options.add_options(command)
            continue
        text = 'GPUs of a node, one process each; with run.device = "cpu", processes of a node'
        command.add_argument("--gpus-per-node", type=positive_int, default=8, metavar="N", help=text)
        command.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write (default: launch/NAME)")
        text = "seconds between the stop signal and the end of the job, for a last checkpoint"
        command.add_argument("--grace", type=positive_int, default=180, metavar="SECONDS", help=text)
        if target == "slurm":
            command.add_argument("--time", default="24:00:00", metavar="LIMIT", help="time limit")
            text = "further option of sbatch, such as --sbatch=--partition=gpu"
            command.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=text)
        elif target == "kubernetes":
            command.add_argument("--image", required=True, metavar="NAME", help="container image with titanlike")
            text = "persistent volume claim for the working directory: data, run directories and checkpoints"
            command.add_argument("--claim", default="", metavar="NAME", help=text)
            text = "secret with environment variables, such as S3 credentials"
            command.add_argument("--secret", default="", metavar="NAME", help=text)
            text = (
                "JobSet, Kubeflow's TrainJob with a runtime of its own, or the HyperPodPyTorchJob of SageMaker HyperPod"
            )
            command.add_argument("--kind", choices=KINDS, default="jobset", help=text)
        elif target == "skypilot":
            text = "SkyPilot's name of the GPU, such as A100-80GB"
            command.add_argument("--accelerator", default="H100", metavar="NAME", help=text)
            text = "where to rent the instances, CLOUD[/REGION[/ZONE]] (default: the cheapest of those set up)"
            command.add_argument("--infra", default="", metavar="CLOUD", help=text)
            text = "use spot instances: cheaper; the job resumes after a preemption"
            command.add_argument("--spot", action="store_true", help=text)
            text = "disk of each node"
            command.add_argument("--disk-size", type=positive_int, default=256, metavar="GB", help=text)
            text = "local path or URL of an object store that is copied to PATH on each node, such as data"
            command.add_argument("--file-mount", action="append", default=[], metavar="PATH=SOURCE", help=text)
            text = "SkyPilot's network volume that all nodes mount at PATH"
            command.add_argument("--volume", action="append", default=[], metavar="PATH=NAME", help=text)
            text = "environment variable of this shell to pass as a secret, such as HF_TOKEN"
            command.add_argument("--secret", action="append", default=[], metavar="VARIABLE", help=text)
        else:
            command.add_argument("--image", default="titanlike", metavar="NAME", help="name of the image")


def _job(arguments: argparse.Namespace) -> ClusterJob:
    command_line = Arguments([arguments.recipe, *arguments.overrides])
    return cluster_job.make_job(
        command_line.recipe,
        command_line.overrides,
        num_nodes=arguments.nodes,
        processes_per_node=arguments.gpus_per_node,
        hardware=arguments.hardware,
        grace=arguments.grace,
        program_beside_recipe=arguments.target != "slurm",
    )


def _slurm(arguments: argparse.Namespace) -> int:
    if not re.fullmatch(TIME_LIMIT, arguments.time):
        raise UserError(
            f"--time {shown(arguments.time)}: give minutes, hours:minutes:seconds or days-hours, as for sbatch"
        )
    if not arguments.dry_run:
        cluster_job.require("sbatch")
    job = _job(arguments)
    folder = (arguments.out or Path("launch", job.name)).absolute()
    text = slurm.batch_file(job, folder / "recipe.toml", arguments.time, arguments.sbatch)
    job.write(folder, {"recipe.toml": job.resolved, "job.sbatch": text})
    return _submit(arguments, job, folder, ["sbatch", str(folder / "job.sbatch")])


def _kubernetes(arguments: argparse.Namespace) -> int:
    import yaml

    for option in ("image", "claim", "secret"):
        if (name := getattr(arguments, option)) or option == "image":
            cluster_job.check_name(f"--{option}", name)
    if not arguments.dry_run:
        cluster_job.require("kubectl")
    job = cluster_job.dns_name(_job(arguments))
    if not arguments.claim and "://" not in job.recipe.checkpoint.dir:
        raise UserError(
            "a pod that is replaced loses its checkpoints; give --claim, a volume that all pods mount, or "
            "--checkpoint.dir=s3://bucket/runs"
        )
    options = kubernetes.PodOptions(arguments.image, arguments.claim, arguments.secret)
    manifests = KINDS[arguments.kind](job, options)
    folder = arguments.out or Path("launch", job.name)
    file = f"{arguments.kind}.yaml"
    job.write(folder, {file: yaml.safe_dump_all(manifests, sort_keys=False)})
    return _submit(arguments, job, folder, ["kubectl", "apply", "--filename", str(folder / file)])


def _skypilot(arguments: argparse.Namespace) -> int:
    for option, names in (("--accelerator", [arguments.accelerator]), ("--secret", arguments.secret)):
        for name in names:
            cluster_job.check_name(option, name)
    file_mounts = skypilot.parse_mounts("--file-mount", arguments.file_mount)
    volumes = skypilot.parse_mounts("--volume", arguments.volume)
    if not arguments.dry_run:
        cluster_job.require("sky")
    job = cluster_job.dns_name(_job(arguments))
    skypilot.check_checkpoints(job, volumes)
    folder = (arguments.out or Path("launch", job.name)).absolute()

    def files(wheel: str) -> dict[str, str]:
        task = skypilot.task(
            job,
            folder,
            wheel,
            accelerator=arguments.accelerator,
            infra=arguments.infra,
            spot=arguments.spot,
            disk_size=arguments.disk_size,
            file_mounts=file_mounts,
            volumes=volumes,
            secrets=arguments.secret,
        )
        # An empty .skyignore: without it, SkyPilot would leave out what git ignores.
        return {"task.yaml": skypilot.as_yaml(task), ".skyignore": ""}

    _write_with_wheel(job, folder, files)
    secrets = [word for name in arguments.secret for word in ("--secret", name)]
    return _submit(arguments, job, folder, ["sky", "jobs", "launch", *secrets, str(folder / "task.yaml")])


def _sagemaker(arguments: argparse.Namespace) -> int:
    from titanlike.tools.clusters.sagemaker.job import launch

    command_line = Arguments([arguments.recipe, *arguments.overrides])
    return launch(arguments, command_line.recipe, command_line.overrides)


def _docker(arguments: argparse.Namespace) -> int:
    cluster_job.check_name("--image", arguments.image)
    if not arguments.dry_run:
        cluster_job.require("docker")
    job = _job(arguments)
    folder = arguments.out or Path("launch", job.name)
    _write_with_wheel(job, folder, lambda wheel: {"Dockerfile": docker.dockerfile(job, arguments.image, folder, wheel)})
    return _submit(arguments, job, folder, ["docker", "build", "--tag", arguments.image, str(folder)])


def _write_with_wheel(job: ClusterJob, folder: Path, files: Callable[[str], dict[str, str]]) -> None:
    """Writes the recipe, its program, the wheel of titanlike, and the files that are made from the name of the wheel."""
    with tempfile.TemporaryDirectory() as wheels:
        wheel = docker.build_wheel(Path(wheels))
        job.write(folder, {**files(wheel), "recipe.toml": job.resolved, job.program.name: job.program.read_text()})
        (folder / wheel).write_bytes(Path(wheels, wheel).read_bytes())


def _submit(arguments: argparse.Namespace, job: ClusterJob, folder: Path, command: list[str]) -> int:
    print(job.planned.rstrip())
    files = ", ".join(sorted(file.name for file in folder.iterdir()))
    print(f"wrote {folder}: {files}; run {job.recipe.run.name}", flush=True)  # before what the command prints
    if arguments.dry_run:
        print(f"to submit: {shlex.join(command)}")
        return 0
    return subprocess.run(command, check=False).returncode
