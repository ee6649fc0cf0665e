"""Environment variables that launchers set: the rank of this process and its job. Does not import torch.

Together with `launch_config.py`, `sagemaker.py` and `titanlike.utils.system` the only reader of environment variables.
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import NoReturn

from titanlike.config import UserError
from titanlike.config.base import printable, shown
from titanlike.config.shipped import train_command
from titanlike.utils.arguments import parse_int
from titanlike.utils.system import can_resolve, signal_at_parent_death

DEFAULT_PORT = 29500
MAX_PROCESSES = 10**6  # of a job: more is a mistake
LAUNCHER_PID = "TITANLIKE_LAUNCHER_PID"  # set by the launcher
ELASTIC = "TITANLIKE_ELASTIC"  # set by the launcher if the number of nodes may change
SPARES = "TITANLIKE_SPARES"  # number of processes that are not in the job
LAUNCH_ID = "TITANLIKE_LAUNCH_ID"  # set by the launcher, the same for all processes and restarts
BATCH_RECORD = "TITANLIKE_BATCH_RECORD"  # set by `titanlike verify`: the folder of `data/batches/batch_record.py`
EXIT_RANK_MISSING = 3  # exit code after a hang that the watchdog has reported
MAX_LINE = 1200  # characters of an error
ERROR_DELAY = 3.0  # seconds; torchrun polls its processes ten times a second


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
    """Identifies a launch by the launcher in run/launch.py; None under other launchers."""
    is_elastic: bool = False
    """Whether the number of nodes may change when the job restarts."""


def rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Reads the variables that torchrun sets. Without them, this is the only process."""
    rank_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(environ.get(name) for name in rank_variables):
        return RankInfo(is_elastic=ELASTIC in environ)
    required = (*rank_variables, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if not environ.get(name)]
    if missing:
        present = [show_variable(environ, name) for name in required if environ.get(name)]
        raise UserError(
            f"{', '.join(present)} set, but {', '.join(missing)} not: start with {train_command()} or torchrun, "
            "which set all of them, or unset them all to train in one process"
        )
    world_size = read_integer(environ, "WORLD_SIZE", least=1, most=MAX_PROCESSES)
    rank = read_integer(environ, "RANK")
    if rank >= world_size:
        raise UserError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0")
    local_rank = read_integer(environ, "LOCAL_RANK", most=rank)
    read_port(environ)
    return RankInfo(
        rank,
        world_size,
        local_rank,
        read_integer(environ, "LOCAL_WORLD_SIZE", local_rank + 1, least=local_rank + 1, most=world_size),
        started_by_launcher=True,
        restart_count=read_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        max_restarts=read_integer(environ, "TORCHELASTIC_MAX_RESTARTS", 0),
        launch_id=environ.get(LAUNCH_ID),
        is_elastic=ELASTIC in environ,
    )


def set_world_size(size: int) -> None:
    """Sets the number of processes in the job, of which torchrun has started more."""
    os.environ |= {SPARES: str(int(os.environ["WORLD_SIZE"]) - size), "WORLD_SIZE": str(size)}


def num_spares(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that torchrun has started and that are not in the job."""
    return int(environ.get(SPARES, "0"))


def is_first_on_node(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the process of its node that prints messages for all of them."""
    return (environ.get("LOCAL_RANK") or "0") == "0"


def new_launch_id() -> str:
    """Returns a time stamp with a random suffix: an array of jobs may start several launches within one second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_rank_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Raises `UserError` if MASTER_ADDR was set by hand or from Slurm and no machine has this name."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        check_address(environ["MASTER_ADDR"])


def check_address(address: str) -> None:
    """Raises `UserError` if no machine has this name: torch would repeat the look-up for minutes."""
    if not can_resolve(address):
        raise UserError(
            f"MASTER_ADDR={shown(address)} cannot be resolved from this machine; give the host name or the IP address of node 0"
        )


def batch_record_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the folder in which this process records its batches. None: it does not."""
    return environ.get(BATCH_RECORD)


def fail(error: UserError, code: int = 2) -> NoReturn:
    """Prints a user's mistake and exits."""
    print_error(error)
    sys.exit(code)


def print_error(error: UserError) -> None:
    """Prints a user's mistake, one line per problem.

    If all processes of a node find the same mistake, only the first one prints it: the others wait, and the launcher terminates
    them in this time. A process that alone finds a mistake is not terminated, and prints it after the wait.
    """
    if not is_first_on_node():
        time.sleep(ERROR_DELAY)
    for line in str(error).split("\n"):
        text = printable(line)  # a file name, for example, can contain control characters
        if len(text) > MAX_LINE:  # repeats a long value; the remedy is at the end
            text = f"{text[: MAX_LINE // 2]} ... {text[-MAX_LINE // 2 :]}"
        print(f"error: {text}", file=sys.stderr, flush=True)


def terminate_with_launcher(environ: MutableMapping[str, str] = os.environ) -> None:
    """Requests SIGTERM for this process when torchrun dies, on Linux.

    An orphaned process would continue to write to a run directory that the next launch resumes from.
    """
    # Removed: it is not the parent of a torchrun that a program of this process starts.
    launcher = parse_int(environ.pop(LAUNCHER_PID, ""))
    if "TORCHELASTIC_RUN_ID" in environ:
        # Not only the current parent: the launcher may have died since it started this process, which another process has adopted
        # since, such as process 1, a session manager or a container runtime.
        signal_at_parent_death(launcher or os.getppid(), signal.SIGTERM)


def show_variable(environ: Mapping[str, str], name: str) -> str:
    """Returns a variable with its value, for an error."""
    return f"{name}={shown(environ.get(name, ''))}"


def read_port(environ: Mapping[str, str]) -> int:
    """Returns MASTER_PORT."""
    return read_integer(environ, "MASTER_PORT", DEFAULT_PORT, least=1, most=65535)


def read_integer(
    environ: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0, most: int = 10**9
) -> int:
    """Returns the value of a variable. Raises `UserError` if it is not an integer in these bounds."""
    text = environ.get(name) or ("" if default is None else str(default))
    value = parse_int(text)
    if value is None:
        raise UserError(f"{show_variable(environ, name)} is not an integer" + (" below 10^9" if text.isdigit() else ""))
    if not least <= value <= most:
        raise UserError(f"{name}={value} must be at least {least}" + (f" and at most {most}" if most < 10**9 else ""))
    return value
