"""A recipe as a job of a cluster: checked for its processes, with the name and the timeouts that make a restart resume it."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.distributed import environment
from titanlike.recipe import PretrainRecipe
from titanlike.run.start import name_of, program_of
from titanlike.tools.output_files import writing
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.programs import SHIPPED, known_sections, load_known, options_of, run_program

MIN_GRACE = 60  # seconds
EXIT_MARGIN = 30  # seconds between the end of the processes and the end of the job
STOPPED = {"SIGINT": 130, "SIGUSR1": 138, "SIGTERM": 143}  # exit codes of the launcher after a graceful stop
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}  # of the scheme of a URL
USER_ERROR = 2  # exit code that a restart would repeat

# A file name that needs no quotes in a Dockerfile and is a key of a ConfigMap.
PROGRAM_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True)
class ClusterJob:
    """What the files of all schedulers are made from."""

    name: str
    recipe: PretrainRecipe
    resolved: str
    """The resolved recipe as TOML, with the sections of its own program, too."""
    program: Path
    num_nodes: int
    processes_per_node: int
    grace: int
    """Seconds between the stop signal and the end of the job."""
    planned: str
    """What `--check` printed: the recipe is valid, and its planned memory, speed and cost."""
    hardware: str
    """Name or file of the nodes' hardware. "": unknown."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs to request: one per process, and none on the CPU."""
        return self.processes_per_node if self.recipe.run.allows_cuda else 0

    @property
    def efa_interfaces(self) -> int:
        """Interfaces of AWS's EFA to request per node: those of its GPUs, and none for a single node."""
        if not self.hardware or self.num_nodes == 1:
            return 0
        hardware = load_hardware(self.hardware)
        return hardware.efa_interfaces * self.gpus_per_node // hardware.gpus_per_node

    def write(self, folder: Path, files: Mapping[str, str]) -> None:
        """Writes files into a folder that is new or empty. Raises `UserError` if it is not."""
        with writing(folder, "--out"):
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise UserError(f"--out {folder} is not empty; choose another folder, or remove it")
            for name, text in files.items():
                (folder / name).write_text(text)


def make_job(
    path: Path,
    overrides: Mapping[str, str],
    *,
    num_nodes: int,
    processes_per_node: int,
    hardware: str,
    grace: int,
    program_beside_recipe: bool,
) -> ClusterJob:
    """Checks a recipe for all processes of a job and resolves it. Raises `UserError` before anything is written.

    Args:
        path: The recipe.
        overrides: Its keys on the command line.
        num_nodes: Number of nodes.
        processes_per_node: Number of processes of a node.
        hardware: Hardware of the nodes and of the plan, or "" for that of the recipe.
        grace: Seconds between the stop signal and the end of the job.
        program_beside_recipe: Whether the program is copied beside the recipe, or used where it is.
    """
    if grace < MIN_GRACE:
        raise UserError(
            f"--grace {grace} leaves no time for a last checkpoint; give {MIN_GRACE} or more, the seconds that a save takes, and "
            f"{EXIT_MARGIN}"
        )
    program = program_of(path, overrides.get("program")).resolve()  # the recipe of the job is in another directory
    if program_beside_recipe and not PROGRAM_NAME.fullmatch(program.name):
        raise UserError(f"program = '{shown(program.name)}': name the program with letters, digits and . _ - only")
    recipe = load_known(path, overrides)
    if recipe.checkpoint.resume_from:
        raise UserError(
            f"checkpoint.resume_from = {recipe.checkpoint.resume_from}: each restart of the job would go back to that step; resume "
            "from it with ./run_train.sh first, and the job resumes from the newest checkpoint"
        )
    gpus = load_hardware(hardware).gpus_per_node if hardware.startswith("ml.") else processes_per_node
    if processes_per_node > gpus and recipe.run.allows_cuda:
        raise UserError(f"--gpus-per-node {processes_per_node}: {hardware} has {gpus}; give --gpus-per-node {gpus}")
    name = recipe.run.name or f"{name_of(path.stem)}-{environment.new_launch_id()}"
    keys = {
        **overrides,
        "program": program.name if program_beside_recipe else str(program),
        "run.name": name,
        "run.shutdown_timeout": str(grace - EXIT_MARGIN),
    }
    if program in SHIPPED:
        keys["program"] = program.stem
    arguments = [str(path), *options_of(keys)]
    planned_on = [f"--metrics.hardware={hardware}"] if hardware else []
    planned = run_program(program, *arguments, f"--check={num_nodes * processes_per_node}", *planned_on)
    resolved = run_program(program, *arguments, "--resolved")
    return ClusterJob(
        name=name,
        recipe=known_sections(resolved),
        resolved=f"# The recipe of the job {name}, resolved from {path}.\n{resolved}",
        program=program,
        num_nodes=num_nodes,
        processes_per_node=processes_per_node,
        grace=grace,
        planned=planned,
        hardware=hardware or recipe.metrics.hardware,
    )


def extras_of(recipe: PretrainRecipe) -> list[str]:
    """Returns the optional dependencies of titanlike that a job may need: for its data, its addresses and its trackers."""
    data, evaluation = recipe.data, recipe.evaluation
    paths = [data.path, *data.mixture, data.validation_path, *evaluation.data, *evaluation.tasks]
    schemes = {path.partition("://")[0] for path in (*paths, recipe.checkpoint.dir, recipe.metrics.tensorboard_dir)}
    stores = {EXTRAS[scheme] for scheme in schemes & EXTRAS.keys()}
    return sorted({"data", *stores, *({"wandb", "mlflow"} & set(recipe.metrics.trackers))})


def dns_name(job: ClusterJob) -> ClusterJob:
    """Returns the job with a name that Kubernetes allows for its objects. The run keeps its name."""
    name = re.sub("[^a-z0-9]+", "-", job.name.lower()).strip("-")[:40].strip("-")  # pods add to it; the limit is 63
    return replace(job, name=name if name[:1].isalpha() else f"run-{name}".strip("-"))


def check_name(option: str, name: str) -> None:
    """Raises `UserError` for a name that would be something else in the file that has it. Its grammar is the scheduler's."""
    if not re.fullmatch(r"[\w.:/@\[\]-]+", name, re.ASCII) or name.startswith("-"):
        raise UserError(f"{option} {shown(name)} is not a name; use letters, digits and . _ - : / @")


def require(command: str) -> None:
    """Raises `UserError` if a program that submits jobs is not installed here."""
    if shutil.which(command) is None:
        raise UserError(f"{command} is not on the PATH; install it, or write the files only with --dry-run")
