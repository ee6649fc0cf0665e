"""Runs this node's processes under torchrun: restarts, shutdown, and a report of the process that failed first."""

import logging
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed.launcher.api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.run import parse_args, run

from titanlike.distributed.command_line import BROKEN_PIPE
from titanlike.distributed.environment import EXIT_RANK_MISSING
from titanlike.distributed.launch_config import LaunchConfig
from titanlike.utils import system
from titanlike.utils.live_line import LiveLine, print_line

TERMINATION = 20  # seconds; torchrun kills the others 30 s after the first failure
USER_ERROR = 2  # the process has printed it, and a restart would meet it again
STOPPED = [BROKEN_PIPE, *(128 + number for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP))]
# torchrun's own signals, and the one that Slurm's --signal=USR1@120 sends before the time limit.
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


def torchrun(config: LaunchConfig, program: list[str], shutdown_timeout: int) -> int:
    """Runs the processes. Returns the exit code of the first failure, or 128 + the signal that stopped the launcher."""
    # Failures are reported here in one line. torchrun's own report would follow the program's error message and hide it.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    LiveLine.when_unread = lambda: None  # the processes stop by themselves if their output is the same
    signals = [name for name in SIGNALS if name != "SIGHUP" or not system.ignores_hangup()]
    agent = _agent_type(shutdown_timeout, is_elastic=config.max_nodes > 0)
    torch.distributed.launcher.api.LocalElasticAgent = agent  # type: ignore[misc]
    options = [
        f"--nproc-per-node={config.processes_per_node}",
        f"--max-restarts={config.max_restarts}",
        f"--signals-to-handle={','.join(signals)}",
    ]
    if config.max_nodes:
        # A node that joins finds no process group of an earlier number of nodes: rank 0 opens a store for each.
        system.set_variables({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        options += [
            f"--nnodes={config.num_nodes}:{config.max_nodes}",
            "--rdzv-backend=c10d",
            "--rdzv-id=titanlike",
            f"--rdzv-endpoint={config.master_address}:{config.master_port}",
            f"--local-addr={system.address_towards(config.master_address, config.master_port)}",
        ]
    elif config.num_nodes == 1:
        options.append("--standalone")
    else:
        options += [
            f"--nnodes={config.num_nodes}",
            f"--node-rank={config.node_rank}",
            f"--master-addr={config.master_address}",
            f"--master-port={config.master_port}",
        ]
    try:
        run(parse_args([*options, *program]))
    except ChildFailedError as error:
        rank, failure = _first_failure(error.failures)
        used_up = [f"all of MAX_RESTARTS={config.max_restarts} are used up"] if config.max_restarts else []
        if failure.exitcode == EXIT_RANK_MISSING:  # reported by the watchdog
            problems = used_up
        elif failure.exitcode == USER_ERROR or failure.exitcode in STOPPED:
            problems = []
        else:
            problems = [_describe(rank, failure.exitcode), *used_up]
        if problems:
            print_line(f"error: {'; '.join(problems)}", sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as stopped:
        return 128 + stopped.sigval
    except RendezvousError as error:
        print_line(f"error: {_describe_rendezvous(error, config)}", sys.stderr)
        return 1
    return 0


def _describe_rendezvous(error: RendezvousError, config: LaunchConfig) -> str:
    """Describes why the nodes did not meet."""
    if isinstance(error, RendezvousClosedError):
        return "the job has ended"
    where = f"MASTER_ADDR={config.master_address} and MASTER_PORT={config.master_port}"
    if isinstance(error, RendezvousTimeoutError):
        return f"fewer than {config.num_nodes} nodes have met at {where}"
    return f"the node that other nodes meet at cannot be reached ({where}); start the job again, and it resumes"


def _agent_type(shutdown_timeout: int, *, is_elastic: bool) -> type[LocalElasticAgent]:
    """Returns torchrun's agent, with a time limit for the shutdown and without useless restarts.

    If the job is elastic, a signal that stops ranks, but not this launcher, means that a node leaves or joins: the others continue
    without it, or with it.
    """

    class Agent(LocalElasticAgent):
        # Keeps the agent alive until the process exits: if the thread that sends rendezvous heartbeats drops the last reference,
        # torch joins that thread from itself and prints a stack trace.
        current: "Agent"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            type(self).current = self

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if is_elastic and result.is_failed() and _first_failure(result.failures)[1].exitcode in STOPPED:
                print_line("warning: a node leaves or joins; restarting", sys.stderr)
                self._restart_workers(worker_group)
                return RunResult(state=WorkerState.HEALTHY)
            if result.is_failed() and self._remaining_restarts:
                rank, failure = _first_failure(result.failures)
                if failure.exitcode == USER_ERROR or failure.exitcode in STOPPED:
                    self._remaining_restarts = 0
                else:
                    limit = worker_group.spec.max_restarts
                    restarting = f"restarting ({limit - self._remaining_restarts + 1} of {limit})"
                    print_line(f"warning: {_describe(rank, failure.exitcode)}; {restarting}", sys.stderr)
            return result

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            if self._pcontext:
                start = time.monotonic()
                if isinstance(sys.exc_info()[1], SignalException):  # not after a failure: other ranks may wait for it
                    timeout = shutdown_timeout
                try:
                    self._pcontext.close(death_sig, timeout)
                except SignalException as second:  # such as a second Ctrl-C, at which the processes exit at once
                    death_sig = second.sigval
                    self._pcontext.close(death_sig, timeout)
                if time.monotonic() - start >= timeout:
                    print_line(
                        f"error: the processes did not exit within {timeout} s of {death_sig.name} and were killed; a "
                        "checkpoint in progress is lost, earlier ones are kept; for more time, increase run.shutdown_timeout",
                        sys.stderr,
                    )
            super()._shutdown(death_sig)

    return Agent


def _first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Returns the rank and the failure that caused the others.

    This is a process that reported its error, otherwise one that was killed (its peers then lose the connection to it, and may
    appear to fail first), otherwise the earliest.
    """
    ordered = sorted(failures.items(), key=lambda item: item[1].timestamp)
    reported = [item for item in ordered if item[1].exitcode in (USER_ERROR, EXIT_RANK_MISSING)]
    start = ordered[0][1].timestamp
    early = [item for item in ordered if item[1].timestamp - start < TERMINATION]
    killed = [item for item in early if item[1].exitcode < 0 and item[1].exitcode != -signal.SIGTERM]
    return (reported or killed or ordered)[0]


def _describe(rank: int, code: int) -> str:
    if code >= 0:
        return f"process {rank} exited with code {code}; see its output above"
    names = {number.value: number.name for number in signal.Signals}
    cause = ", as by Linux when memory runs out" if code == -signal.SIGKILL else ""
    return f"process {rank} was terminated by {names.get(-code, f'signal {-code}')}{cause}"
