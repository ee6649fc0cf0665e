"""Who this process is among how many, what the machine has, and how the process leaves, without torch.

The one reader of environment variables: the launcher asks it how many processes to start, every program which of them it is.
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
STARTED = "TITANLIKE_STARTED"  # set by the launcher, for the processes that it starts and starts again
EXIT_RANK_MISSING = 3  # exit code of a run that hung, and has said so
ERROR_DELAY = 3.0  # seconds: torchrun looks at its processes ten times a second


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    started_by_launcher: bool = False


@dataclass(frozen=True)
class Job:
    """What a launcher has to start on this machine."""

    num_nodes: int
    node_rank: int
    processes: int  # on this machine
    master_address: str
    master_port: int
    max_restarts: int = 0

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.processes


def ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The rank variables of torchrun, or a single process where there are none."""
    identifying = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(environ.get(name) for name in identifying):
        return Ranks()
    needed = (*identifying, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        given = [f"{name}={environ[name]}" for name in needed if environ.get(name)]
        raise UserError(
            f"{', '.join(given)} set, but {', '.join(missing)} not: start with ./run_train.sh or torchrun, "
            "which set all of them, or unset them all to train in one process"
        )
    rank, world_size, local_rank = (_number(environ, name) for name in identifying)
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", local_rank + 1)
    return Ranks(rank, world_size, local_rank, local_world_size, started_by_launcher=True)


@dataclass(frozen=True)
class Restarts:
    """How often torchrun has started this job's processes again, and how often it may."""

    count: int = 0
    limit: int = 0


def restarts(environ: Mapping[str, str] = os.environ) -> Restarts:
    """What torchrun says of restarts; none where it did not start this process."""
    if not has_rank_variables(environ):
        return Restarts()
    return Restarts(_number(environ, "TORCHELASTIC_RESTART_COUNT", 0), _number(environ, "TORCHELASTIC_MAX_RESTARTS", 0))


def new_launch_id() -> str:
    """What tells one start from another. The last part keeps apart what starts within one second, as an array's jobs do."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def launch_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The launcher's own, the same for every process that it starts, and starts again; None where it started none."""
    return environ.get(STARTED) if has_rank_variables(environ) else None


def is_first_on_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the one of its machine that speaks."""
    return environ.get("LOCAL_RANK", "0") == "0"


def fail(error: UserError, code: int = 2) -> NoReturn:
    """Show a user's mistake, one line a problem, and leave.

    Of several processes that meet the same mistake, the first of the machine speaks: the others wait, and the launcher
    ends them. One that has met a mistake of its own is not ended, and speaks after its wait.
    """
    if not is_first_on_machine():
        time.sleep(ERROR_DELAY)
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(code)


def terminate_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Be told to stop (SIGTERM) when torchrun dies: nobody else would end this process, and it would go on writing into a
    run's folder that the next start takes up. Linux alone can do this."""
    if "TORCHELASTIC_RUN_ID" in environ:
        signal_at_parent_death(os.getppid(), signal.SIGTERM)


def job(environ: Mapping[str, str] = os.environ) -> Job:
    """How many processes to start here: NPROC, else one a GPU, else one; and on how many machines.

    MAX_RESTARTS is how often they may be started again when one of them dies.
    Machines come from NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, else from Slurm when `srun` started one task a
    machine, else there is one.
    """
    processes = _number(environ, "NPROC") if environ.get("NPROC") else max(1, num_gpus(environ))
    if processes < 1:
        raise UserError(f"NPROC={processes}: at least one process is needed")
    max_restarts = _number(environ, "MAX_RESTARTS") if environ.get("MAX_RESTARTS") else 0
    if max_restarts < 0:
        raise UserError(f"MAX_RESTARTS={max_restarts}: give the number of restarts, 0 for none")
    nodes, node_rank, address = 1, 0, environ.get("MASTER_ADDR", "127.0.0.1")
    if environ.get("NNODES"):
        nodes = _number(environ, "NNODES")
        if nodes > 1:
            missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not environ.get(name)]
            if missing:
                raise UserError(
                    f"NNODES={nodes}, but {' and '.join(missing)} not set: give each machine its own NODE_RANK from 0, and "
                    "all of them the address of machine 0 as MASTER_ADDR"
                )
            node_rank = _number(environ, "NODE_RANK")
    elif "SLURM_STEP_ID" in environ and _number(environ, "SLURM_NNODES", 1) > 1:
        nodes, node_rank = _number(environ, "SLURM_NNODES"), _number(environ, "SLURM_NODEID")
        address = environ.get("MASTER_ADDR") or first_host(environ["SLURM_JOB_NODELIST"])
    if not 0 <= node_rank < nodes:
        raise UserError(f"NODE_RANK={node_rank} is not below NNODES={nodes}: machines count from 0")
    return Job(nodes, node_rank, processes, address, _number(environ, "MASTER_PORT", DEFAULT_PORT), max_restarts)


def rank_variables_from_slurm(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """torchrun's variables where `srun` started one task a rank; None where it did not."""
    tasks, nodes = _number(environ, "SLURM_NTASKS", 1), _number(environ, "SLURM_NNODES", 1)
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or tasks <= nodes:
        return None
    if environ.get("MAX_RESTARTS", "0") != "0":
        raise UserError(
            f"MAX_RESTARTS={environ['MAX_RESTARTS']}, but srun started one task a process, and nothing restarts a task; start "
            "one a machine (srun --ntasks-per-node=1), or unset MAX_RESTARTS"
        )
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(-(-tasks // nodes)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ["SLURM_JOB_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(DEFAULT_PORT),
    }


def first_host(node_list: str) -> str:
    """The first machine of a Slurm node list: `gpu[007-009,12],cpu1` starts with gpu007."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", node_list)
    if match is None:
        raise UserError(f"SLURM_JOB_NODELIST={node_list} cannot be read; set MASTER_ADDR to the first machine")
    return match.group(1) + (match.group(2) or "")


def has_rank_variables(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun or the like has already made this process one rank of many."""
    return bool(environ.get("RANK"))


def variables(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process to be started here: ours with these changes, and no place in another job."""
    from_torchrun = "TORCHELASTIC_"
    identifying = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_JOB_NUM_NODES",
        "MAX_RESTARTS",
        STARTED,
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in identifying and not name.startswith(from_torchrun)
    }
    return kept | dict(changes)


def set_launch_id() -> None:
    """Give the processes that this one starts a stamp in common, whatever the user's own variables say."""
    os.environ[STARTED] = new_launch_id()


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text} is not a whole number") from None
