"""The processes that a launcher starts on this node, from its environment variables. Does not import torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.distributed.environment import (
    DEFAULT_PORT,
    LAUNCH_ID,
    LAUNCHER_PID,
    MAX_PROCESSES,
    new_launch_id,
    read_integer,
    read_port,
    show_variable,
)
from titanlike.utils.system import num_gpus

JOB_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES",
    "MAX_RESTARTS", LAUNCH_ID, LAUNCHER_PID,
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

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.processes_per_node


def launch_config(environ: Mapping[str, str] = os.environ, *, default_processes: int | None = None) -> LaunchConfig:
    """Reads the processes to launch on this node.

    NPROC is their number, by default `default_processes`, otherwise one per GPU, or one. MAX_RESTARTS limits restarts after a
    failure. NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set the nodes, otherwise Slurm does if `srun` started one task per node,
    otherwise there is one.
    """
    processes = default_processes or max(1, num_gpus(environ))
    if environ.get("NPROC"):
        processes = read_integer(environ, "NPROC", least=1, most=MAX_PROCESSES)
    max_restarts = read_integer(environ, "MAX_RESTARTS", 0)
    num_nodes, node_rank, address = 1, 0, environ.get("MASTER_ADDR") or "127.0.0.1"
    if environ.get("NNODES"):
        num_nodes = read_integer(environ, "NNODES", least=1, most=MAX_PROCESSES)
        if num_nodes > 1:
            missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not environ.get(name)]
            if missing:
                raise UserError(
                    f"NNODES={num_nodes}, but {' and '.join(missing)} not set: give each node its own NODE_RANK from 0, and "
                    "all of them the address of node 0 as MASTER_ADDR"
                )
            node_rank = read_integer(environ, "NODE_RANK")
    elif "SLURM_STEP_ID" in environ and read_integer(environ, "SLURM_NNODES", 1) > 1:
        num_nodes = read_integer(environ, "SLURM_NNODES", most=MAX_PROCESSES)
        _require_slurm(environ, "SLURM_NODEID")
        node_rank, address = read_integer(environ, "SLURM_NODEID"), _slurm_master(environ)
    if node_rank >= num_nodes:
        raise UserError(f"NODE_RANK={node_rank} is not below NNODES={num_nodes}: nodes count from 0")
    config = LaunchConfig(num_nodes, node_rank, processes, address, read_port(environ), max_restarts)
    if config.world_size > MAX_PROCESSES:
        raise UserError(
            f"{num_nodes} nodes with NPROC={processes} are {config.world_size} processes; {MAX_PROCESSES} are possible"
        )
    return config


def rank_variables_from_slurm(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Returns torchrun's variables if `srun` started one task per rank, otherwise None."""
    if "SLURM_STEP_ID" not in environ:
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
