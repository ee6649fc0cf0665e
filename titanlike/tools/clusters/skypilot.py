"""The task of SkyPilot, which rents instances of a cloud and replaces those that are preempted."""

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.distributed.environment import DEFAULT_PORT
from titanlike.tools.clusters.cluster_job import STOPPED, ClusterJob, extras_of

PYTHON = "~/titanlike-env/bin/python"
PYTHON_VERSION = "3.12"
# The home directory differs between clouds. A checkpoint location belongs to one path of a run directory.
RUN_FOLDER = PurePosixPath("/tmp/titanlike")

SETUP = """\
# torch.compile needs a C++ compiler, and a Python with its headers, which uv's has.
command -v g++ > /dev/null || {{ sudo apt-get update && sudo apt-get install --yes --no-install-recommends g++; }}
[ -x {python} ] || uv venv --python-preference only-managed --python {version} {folder}
uv pip install --python {python} {wheel}
"""

RUN = """\
# The launcher of each node starts its processes. They meet on the node of rank 0, whose address is the first.
export NNODES="$SKYPILOT_NUM_NODES" NODE_RANK="$SKYPILOT_NODE_RANK" NPROC={processes}
export MASTER_ADDR="$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)"
# The last command: SkyPilot reads its exit code.
{python} -m titanlike.run.launch {arguments}
"""


def task(
    job: ClusterJob,
    folder: Path,
    wheel: str,
    *,
    accelerator: str,
    infra: str,
    spot: bool,
    disk_size: int,
    file_mounts: dict[str, str],
    volumes: dict[str, str],
    secrets: Sequence[str],
) -> dict[str, Any]:
    """Returns the task.

    Args:
        job: The job. Its name is a DNS label.
        folder: The absolute path of the folder with the recipe, its program and the wheel, which SkyPilot copies to each node.
        wheel: File name of the wheel.
        accelerator: SkyPilot's name of the GPU.
        infra: Cloud, region and zone, or "" for the cheapest.
        spot: Whether to use spot instances.
        disk_size: GB of each node.
        file_mounts: Path on each node -> local path or URL that is copied there.
        volumes: Path on each node -> SkyPilot's name of a network volume that all nodes mount.
        secrets: Environment variables whose values are given when the task is submitted.
    """
    recipe = job.recipe
    arguments = ["recipe.toml"]
    if not PurePosixPath(recipe.run.dir).is_absolute():
        arguments.append(f"--run.dir={RUN_FOLDER / recipe.run.dir}")
    accelerators = {"accelerators": f"{accelerator}:{job.gpus_per_node}"} if job.gpus_per_node else {}
    processes = '"$SKYPILOT_NUM_GPUS_PER_NODE"' if job.gpus_per_node else job.processes_per_node
    setup = SETUP.format(
        python=PYTHON,
        version=PYTHON_VERSION,
        folder=PYTHON.removesuffix("/bin/python"),
        wheel=shlex.quote(f"./{wheel}[{','.join(extras_of(recipe))}]"),
    )
    return {
        "name": job.name,
        "num_nodes": job.num_nodes,
        "resources": {
            **({"infra": infra} if infra else {}),
            **accelerators,
            "disk_size": disk_size,
            "use_spot": spot,
            # SkyPilot always replaces preempted instances. After a failure, the job is restarted once, on new instances; after a
            # stop by a signal, without a limit.
            "job_recovery": {"max_restarts_on_errors": 1, "recover_on_exit_codes": list(STOPPED.values())},
        },
        "workdir": str(folder),
        # Restarts of all processes after a failure, on the same nodes.
        "envs": {"MAX_RESTARTS": "3", "MASTER_PORT": str(DEFAULT_PORT)},
        **({"secrets": dict.fromkeys(secrets)} if secrets else {}),
        **({"file_mounts": file_mounts} if file_mounts else {}),
        **({"volumes": volumes} if volumes else {}),
        "setup": f"set -e\n{setup}",
        "run": RUN.format(processes=processes, python=PYTHON, arguments=shlex.join(arguments)),
    }


def as_yaml(task: dict[str, Any]) -> str:
    """Returns a task as YAML, with its commands as they would be written by hand."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return str(yaml.dump(task, Dumper=Dumper, sort_keys=False, width=1000))


def check_checkpoints(job: ClusterJob, volumes: dict[str, str]) -> None:
    """Raises `UserError` if the checkpoints would be lost with an instance.

    A bucket that is mounted as a folder is not enough: local checkpoints are committed by renaming a directory.
    """
    folder = job.recipe.checkpoint.dir or job.recipe.run.dir
    if "://" not in folder and not any(PurePosixPath(folder).is_relative_to(path) for path in volumes):
        raise UserError(
            "an instance that is replaced loses its checkpoints; give --checkpoint.dir=gs://bucket/runs, or --volume PATH=NAME, a "
            "volume that all nodes mount, and --checkpoint.dir=PATH/runs"
        )


def parse_mounts(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Returns the path -> source of mounts. SkyPilot replaces variables in them, and needs absolute paths."""
    mounts = {}
    for text in texts:
        path, _, source = text.partition("=")
        if not PurePosixPath(path).is_absolute() or not source or "$" in text:
            raise UserError(f"{option} {shown(text)}: give PATH=SOURCE, with an absolute path and without variables")
        mounts[path] = source
    return mounts
