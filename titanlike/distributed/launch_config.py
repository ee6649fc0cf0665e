"""The processes that a launcher starts on this node, from its environment variables. Does not import torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.distributed.environment import (
    DEFAULT_PORT,
    ELASTIC,
    LAUNCH_ID,
    LAUNCHER_PID,
    MAX_PROCESSES,
    new_launch_id,
    read_integer,
    read_port,
    show_variable,
)
from titanlike.utils.arguments import parse_int
from titanlike.utils.system import num_gpus

SLURM_INTERACTIVE_STEP = "4294967290"
ELASTIC_RESTARTS = 10  # after failures: nodes that join or leave do not count

JOB_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES",
    "MAX_RESTARTS", ELASTIC, LAUNCH_ID, LAUNCHER_PID,
)  # fmt: skip


@dataclass(frozen=True)
class LaunchConfig:
    """The processes to launch on this node."""

    num_nodes: int
    node_rank: int
    processes_per_node: int
    master_address: str
    master_port: int
    max_restarts: int = 0
    max_nodes: int = 0
    """If above 0, the job is elastic: it runs on `num_nodes` to `max_nodes` nodes."""

    @property
    def world_size(self) -> int:
        """The number of processes, in an elastic job the least."""
        return self.num_nodes * self.processes_per_node

    def label(self) -> str:
        """Returns what is launched: until all nodes have met, nothing else happens."""
        number = self.processes_per_node
        processes = f"{number} process{'es' if number > 1 else ''}"
        if self.num_nodes == 1 and not self.max_nodes:
            return processes
        nodes = f"{self.num_nodes} to {self.max_nodes}" if self.max_nodes else self.num_nodes
        return f"{processes} on each of {nodes} nodes, which meet at {self.master_address}:{self.master_port}"


def launch_config(environ: Mapping[str, str] = os.environ, *, default_processes: int | None = None) -> LaunchConfig:
    """Reads the processes to launch on this node.

    NPROC is their number, by default `default_processes`, otherwise one per GPU, or one. MAX_RESTARTS limits restarts after a
    failure. NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set the nodes, otherwise Slurm does if `srun` started one task per node,
    otherwise there is one. NNODES=2:4 makes the job elastic.
    """
    processes = default_processes or max(1, num_gpus(environ))
    if environ.get("NPROC"):
        processes = read_integer(environ, "NPROC", least=1, most=MAX_PROCESSES)
    is_elastic = ":" in environ.get("NNODES", "")
    max_restarts = read_integer(environ, "MAX_RESTARTS", ELASTIC_RESTARTS if is_elastic else 0)
    num_nodes, node_rank, address, max_nodes = 1, 0, environ.get("MASTER_ADDR") or "127.0.0.1", 0
    if is_elastic:
        num_nodes, max_nodes = _node_range(environ)
        if not environ.get("MASTER_ADDR"):
            raise UserError(
                f"{show_variable(environ, 'NNODES')}, but MASTER_ADDR is not set: give all nodes the address of one of them, at "
                "which they meet"
            )
    elif environ.get("NNODES"):
        num_nodes = read_integer(environ, "NNODES", least=1, most=MAX_PROCESSES)
        if num_nodes > 1:
            missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not environ.get(name)]
            if missing:
                raise UserError(
                    f"NNODES={num_nodes}, but {' and '.join(missing)} not set: give each node its own NODE_RANK from 0, and "
                    "all of them the address of node 0 as MASTER_ADDR"
                )
            node_rank = read_integer(environ, "NODE_RANK")
    elif _is_slurm_step(environ) and read_integer(environ, "SLURM_NNODES", 1) > 1:
        num_nodes = read_integer(environ, "SLURM_NNODES", most=MAX_PROCESSES)
        _require_slurm(environ, "SLURM_NODEID")
        node_rank, address = read_integer(environ, "SLURM_NODEID"), _slurm_master(environ)
    if node_rank >= num_nodes:
        raise UserError(f"NODE_RANK={node_rank} is not below NNODES={num_nodes}: nodes count from 0")
    config = LaunchConfig(num_nodes, node_rank, processes, address, read_port(environ), max_restarts, max_nodes)
    if (most := max(num_nodes, max_nodes)) * processes > MAX_PROCESSES:
        raise UserError(
            f"{most} nodes with NPROC={processes} are {most * processes} processes; {MAX_PROCESSES} are possible"
        )
    return config


def _node_range(environ: Mapping[str, str]) -> tuple[int, int]:
    """Reads NNODES=MIN:MAX."""
    least, most = (parse_int(text) or 0 for text in environ["NNODES"].split(":", 1))
    if not 0 < least <= most <= MAX_PROCESSES:
        raise UserError(
            f"{show_variable(environ, 'NNODES')} is neither a number of nodes nor a range such as NNODES=2:4, from the least to "
            "the most"
        )
    return least, most


def rank_variables_from_slurm(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Returns torchrun's variables if `srun` started one task per rank, otherwise None."""
    if not _is_slurm_step(environ):
        return None
    tasks, num_nodes = (read_integer(environ, name, 1, least=1) for name in ("SLURM_NTASKS", "SLURM_NNODES"))
    if tasks <= num_nodes:
        return None
    if environ.get("MAX_RESTARTS", "0") != "0":
        raise UserError(
            f"{show_variable(environ, 'MAX_RESTARTS')}, but srun started one task per process, and Slurm does not restart single "
            "tasks; start one task per node (srun --ntasks-per-node=1), or unset MAX_RESTARTS"
        )
    _require_slurm(environ, "SLURM_PROCID", "SLURM_LOCALID")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(max(-(-tasks // num_nodes), read_integer(environ, "SLURM_LOCALID") + 1)),
        "MASTER_ADDR": _slurm_master(environ),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(DEFAULT_PORT),
    }


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process for a job step. The shell of an interactive `salloc` is in a step too, alone."""
    return environ.get("SLURM_STEP_ID") not in (None, SLURM_INTERACTIVE_STEP)


def _slurm_master(environ: Mapping[str, str]) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    _require_slurm(environ, "SLURM_JOB_NODELIST")
    return first_host(environ["SLURM_JOB_NODELIST"])


def _require_slurm(environ: Mapping[str, str], *names: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise UserError(
            f"{show_variable(environ, 'SLURM_STEP_ID')} is set, but {' and '.join(missing)} not: start with srun, which sets all "
            "of them, or unset SLURM_STEP_ID to train without Slurm"
        )


def first_host(node_list: str) -> str:
    """Returns the first host of a Slurm node list: gpu007 of `gpu[007-009,12],cpu1`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", node_list)
    if match is None:
        raise UserError(f"SLURM_JOB_NODELIST={shown(node_list)} cannot be parsed; set MASTER_ADDR to the first host")
    return match.group(1) + (match.group(2) or "")


def announce(config: LaunchConfig) -> None:
    """Tells the processes that this launcher starts whether the job is elastic."""
    os.environ.pop(ELASTIC, None)
    if config.max_nodes:
        os.environ[ELASTIC] = "1"


def set_launch_id() -> None:
    """Sets a new launch id for the processes that this launcher starts, whatever id the user's environment has, and its pid."""
    os.environ[LAUNCH_ID] = new_launch_id()
    os.environ[LAUNCHER_PID] = str(os.getpid())


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with changes, and without the variables that make it part of a job."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in JOB_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return kept | dict(changes)
