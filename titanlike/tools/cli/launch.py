"""`titanlike launch`: a recipe as a Slurm job, a Kubernetes job or a container image."""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.distributed import environment
from titanlike.run.start import Arguments
from titanlike.tools.arguments import positive_int
from titanlike.tools.clusters import cluster_job, docker, kubernetes, slurm
from titanlike.tools.clusters.cluster_job import ClusterJob
from titanlike.tools.planning.hardware import DEFAULT_HARDWARE

DESCRIPTION = """\
Checks a recipe for all processes of a job, as a run does, writes what the scheduler needs into a folder, and submits it. The run's
name is fixed, so that a job that is preempted, requeued or submitted again resumes the run.

  titanlike launch slurm llama3_8b --nodes 4 --time 24:00:00 --sbatch=--partition=gpu
  titanlike launch kubernetes llama3_8b --nodes 4 --image registry/titanlike:1 --claim training
  titanlike launch docker llama3_8b --image registry/titanlike:1

--dry-run writes the files and submits nothing."""

TIME_LIMIT = r"(\d+-)?\d+(:\d\d){0,2}"  # of Slurm: minutes, hours:minutes:seconds, days-hours


def add(commands: Any) -> None:
    """Adds `launch` to the commands of `titanlike`."""
    parser = commands.add_parser(
        "launch",
        help="a recipe as a Slurm job, a Kubernetes job or a container image",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    targets = parser.add_subparsers(dest="target", required=True, metavar="slurm|kubernetes|docker")
    for target, text in (
        ("slurm", "write a batch file and submit it with sbatch"),
        ("kubernetes", "write the manifests of a JobSet or a Kubeflow TrainJob and apply them with kubectl"),
        ("docker", "write a Dockerfile with the wheel and the recipe, and build the image"),
    ):
        command = targets.add_parser(target, help=text, description=text[0].upper() + text[1:] + ".")
        text = "recipe; override its keys with --section.key=value"
        command.add_argument("recipe", metavar="RECIPE", help=text)
        command.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="number of nodes (default: 1)")
        text = 'GPUs of a node, one process each; with run.device = "cpu", processes of a node (default: 8)'
        command.add_argument("--gpus-per-node", type=positive_int, default=8, metavar="N", help=text)
        command.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: launch/NAME)")
        command.add_argument("--dry-run", action="store_true", help="write the files and submit nothing")
        text = f"hardware of the plan that is printed (default: {DEFAULT_HARDWARE})"
        command.add_argument("--hardware", default=DEFAULT_HARDWARE, metavar="NAME|FILE", help=text)
        text = "seconds between the stop signal and the end of the job, for a last checkpoint (default: 180)"
        command.add_argument("--grace", type=positive_int, default=180, metavar="SECONDS", help=text)
        if target == "slurm":
            command.add_argument("--time", default="24:00:00", metavar="LIMIT", help="time limit (default: 24:00:00)")
            text = "further option of sbatch, such as --sbatch=--partition=gpu; can be repeated"
            command.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=text)
        elif target == "kubernetes":
            command.add_argument("--image", required=True, help="container image with titanlike")
            text = "persistent volume claim for the working directory: data, run directories and checkpoints"
            command.add_argument("--claim", default="", help=text)
            command.add_argument(
                "--secret", default="", help="secret with environment variables, such as S3 credentials"
            )
            text = "JobSet (default), or Kubeflow's TrainJob with a runtime of its own"
            command.add_argument("--kind", choices=["jobset", "trainjob"], default="jobset", help=text)
        else:
            command.add_argument("--image", default="titanlike", metavar="NAME", help="name (default: titanlike)")


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Runs the command, or exits with the user's error."""
    try:
        sys.exit(
            {"slurm": _slurm, "kubernetes": _kubernetes, "docker": _docker}[arguments.target](arguments, overrides)
        )
    except UserError as error:
        environment.fail(error)


def _job(arguments: argparse.Namespace, overrides: Sequence[str]) -> ClusterJob:
    for override in overrides:
        name = override.partition("=")[0]
        if override.startswith("-") and "." not in name and name != "--recipe":
            raise UserError(f"{shown(name)}: unknown option; see titanlike launch {arguments.target} --help")
    command_line = Arguments([arguments.recipe, *overrides])
    return cluster_job.make_job(
        command_line.recipe,
        command_line.overrides,
        num_nodes=arguments.nodes,
        processes_per_node=arguments.gpus_per_node,
        hardware=arguments.hardware,
        grace=arguments.grace,
        program_beside_recipe=arguments.target != "slurm",
    )


def _slurm(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    if not re.fullmatch(TIME_LIMIT, arguments.time):
        raise UserError(
            f"--time {shown(arguments.time)}: give minutes, hours:minutes:seconds or days-hours, as for sbatch"
        )
    if not arguments.dry_run:
        cluster_job.require("sbatch")
    job = _job(arguments, overrides)
    folder = (arguments.out or Path("launch", job.name)).absolute()
    text = slurm.batch_file(job, folder / "recipe.toml", arguments.time, arguments.sbatch)
    job.write(folder, {"recipe.toml": job.resolved, "job.sbatch": text})
    return _submit(arguments, job, folder, ["sbatch", str(folder / "job.sbatch")])


def _kubernetes(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    import yaml

    cluster_job.check_image(arguments.image, digest=True)
    for option, name in (("--claim", arguments.claim), ("--secret", arguments.secret)):
        if name:
            cluster_job.check_object_name(option, name)
    if not arguments.dry_run:
        cluster_job.require("kubectl")
    job = cluster_job.dns_name(_job(arguments, overrides))
    if not arguments.claim and "://" not in job.recipe.checkpoint.dir:
        raise UserError(
            "a pod that is replaced loses its checkpoints; give --claim, a volume that all pods mount, or "
            "--checkpoint.dir=s3://bucket/runs"
        )
    make = kubernetes.job_set if arguments.kind == "jobset" else kubernetes.train_job
    manifests = make(job, arguments.image, arguments.claim, arguments.secret)
    folder = arguments.out or Path("launch", job.name)
    file = f"{arguments.kind}.yaml"
    job.write(folder, {file: yaml.safe_dump_all(manifests, sort_keys=False)})
    return _submit(arguments, job, folder, ["kubectl", "apply", "--filename", str(folder / file)])


def _docker(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    cluster_job.check_image(arguments.image, digest=False)
    if not arguments.dry_run:
        cluster_job.require("docker")
    job = _job(arguments, overrides)
    folder = arguments.out or Path("launch", job.name)
    with tempfile.TemporaryDirectory() as wheels:
        wheel = docker.build_wheel(Path(wheels))
        text = docker.dockerfile(job, arguments.image, folder, wheel)
        files = {"Dockerfile": text, "recipe.toml": job.resolved, job.program.name: job.program.read_text()}
        job.write(folder, files)
        (folder / wheel).write_bytes(Path(wheels, wheel).read_bytes())
    return _submit(arguments, job, folder, ["docker", "build", "--tag", arguments.image, str(folder)])


def _submit(arguments: argparse.Namespace, job: ClusterJob, folder: Path, command: list[str]) -> int:
    print(job.planned.rstrip())
    print(f"wrote {folder}/{{{','.join(sorted(file.name for file in folder.iterdir()))}}}; run {job.recipe.run.name}")
    if arguments.dry_run:
        print(f"to submit: {shlex.join(command)}")
        return 0
    return subprocess.run(command, check=False).returncode
