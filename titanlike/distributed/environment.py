"""Environment variables of launchers: the rank of this process, and the processes to launch on this node. Does not import torch.

Together with `titanlike.utils.system` the only reader of environment variables.
"""

import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from titanlike.config import UserError
from titanlike.utils.system import num_gpus, signal_at_parent_death

DEFAULT_PORT = 29500
LAUNCH_ID = "TITANLIKE_LAUNCH_ID"  # set by the launcher, the same for all processes and restarts
EXIT_RANK_MISSING = 3  # exit code after a hang that the watchdog has reported
ERROR_DELAY = 3.0  # seconds; torchrun polls its processes ten times a second
JOB_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES",
    "MAX_RESTARTS", LAUNCH_ID,
)  # fmt: skip


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process in its job, and the restarts of that job by torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    started_by_launcher: bool = False
    restart_count: int = 0
    max_restarts: int = 0
    launch_id: str | None = None
    """Identifies a launch by `./run_train.sh`; None under other launchers."""


@dataclass(frozen=True)
class LaunchConfig:
    """The processes to launch on this node."""

    num_nodes: int
    node_rank: int
    processes_per_node: int
    master_address: str
    master_port: int
    max_restarts: int = 0

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.processes_per_node


def rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Reads the variables that torchrun sets. Without them, this is the only process."""
    rank_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(environ.get(name) for name in rank_variables):
        return RankInfo()
    required = (*rank_variables, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if not environ.get(name)]
    if missing:
        present = [f"{name}={environ[name]}" for name in required if environ.get(name)]
        raise UserError(
            f"{', '.join(present)} set, but {', '.join(missing)} not: start with ./run_train.sh or torchrun, "
            "which set all of them, or unset them all to train in one process"
        )
    rank, world_size, local_rank = (_integer(environ, name) for name in rank_variables)
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0")
    return RankInfo(
        rank,
        world_size,
        local_rank,
        _integer(environ, "LOCAL_WORLD_SIZE", local_rank + 1),
        started_by_launcher=True,
        restart_count=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        max_restarts=_integer(environ, "TORCHELASTIC_MAX_RESTARTS", 0),
        launch_id=environ.get(LAUNCH_ID),
    )


def is_first_on_node(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the process of its node that prints messages for all of them."""
    return environ.get("LOCAL_RANK", "0") == "0"


def new_launch_id() -> str:
    """Returns a time stamp with a random suffix: an array of jobs may start several launches within one second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def set_launch_id() -> None:
    """Sets a new launch id for the processes that this launcher starts, whatever id the user's environment has."""
    os.environ[LAUNCH_ID] = new_launch_id()


def launch_config(environ: Mapping[str, str] = os.environ) -> LaunchConfig:
    """Reads the processes to launch on this node.

    NPROC is their number, by default one per GPU, or one. MAX_RESTARTS limits restarts after a failure. NNODES, NODE_RANK,
    MASTER_ADDR and MASTER_PORT set the nodes, otherwise Slurm does if `srun` started one task per node, otherwise there is one.
    """
    processes = _integer(environ, "NPROC") if environ.get("NPROC") else max(1, num_gpus(environ))
    if processes < 1:
        raise UserError(f"NPROC={processes}: at least one process is needed")
    max_restarts = _integer(environ, "MAX_RESTARTS", 0)
    if max_restarts < 0:
        raise UserError(f"MAX_RESTARTS={max_restarts}: give the number of restarts, 0 for none")
    num_nodes, node_rank, address = 1, 0, environ.get("MASTER_ADDR", "127.0.0.1")
    if environ.get("NNODES"):
        num_nodes = _integer(environ, "NNODES")
        if num_nodes > 1:
            missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not environ.get(name)]
            if missing:
                raise UserError(
                    f"NNODES={num_nodes}, but {' and '.join(missing)} not set: give each node its own NODE_RANK from 0, and "
                    "all of them the address of node 0 as MASTER_ADDR"
                )
            node_rank = _integer(environ, "NODE_RANK")
    elif "SLURM_STEP_ID" in environ and _integer(environ, "SLURM_NNODES", 1) > 1:
        num_nodes, node_rank = _integer(environ, "SLURM_NNODES"), _integer(environ, "SLURM_NODEID")
        address = _slurm_master(environ)
    if not 0 <= node_rank < num_nodes:
        raise UserError(f"NODE_RANK={node_rank} is not below NNODES={num_nodes}: nodes count from 0")
    port = _integer(environ, "MASTER_PORT", DEFAULT_PORT)
    return LaunchConfig(num_nodes, node_rank, processes, address, port, max_restarts)


def rank_variables_from_slurm(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Returns torchrun's variables if `srun` started one task per rank, otherwise None."""
    tasks, num_nodes = _integer(environ, "SLURM_NTASKS", 1), _integer(environ, "SLURM_NNODES", 1)
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or tasks <= num_nodes:
        return None
    if environ.get("MAX_RESTARTS", "0") != "0":
        raise UserError(
            f"MAX_RESTARTS={environ['MAX_RESTARTS']}, but srun started one task per process, and Slurm does not restart single "
            "tasks; start one task per node (srun --ntasks-per-node=1), or unset MAX_RESTARTS"
        )
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(-(-tasks // num_nodes)),
        "MASTER_ADDR": _slurm_master(environ),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(DEFAULT_PORT),
    }


def _slurm_master(environ: Mapping[str, str]) -> str:
    return environ.get("MASTER_ADDR") or first_host(environ["SLURM_JOB_NODELIST"])


def first_host(node_list: str) -> str:
    """Returns the first host of a Slurm node list: gpu007 of `gpu[007-009,12],cpu1`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", node_list)
    if match is None:
        raise UserError(f"SLURM_JOB_NODELIST={node_list} cannot be parsed; set MASTER_ADDR to the first host")
    return match.group(1) + (match.group(2) or "")


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with changes, and without the variables that make it part of a job."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in JOB_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return kept | dict(changes)


def fail(error: UserError, code: int = 2) -> NoReturn:
    """Prints a user's mistake, one line per problem, and exits.

    If all processes of a node find the same mistake, only the first one prints it: the others wait, and the launcher terminates
    them in this time. A process that alone finds a mistake is not terminated, and prints it after the wait.
    """
    if not is_first_on_node():
        time.sleep(ERROR_DELAY)
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(code)


def terminate_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Requests SIGTERM for this process when torchrun dies, on Linux.

    An orphaned process would continue to write to a run directory that the next launch resumes from.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        signal_at_parent_death(os.getppid(), signal.SIGTERM)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name) or ("" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text} is not an integer") from None
