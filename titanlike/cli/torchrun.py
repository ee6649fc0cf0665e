"""This machine's share of a job under torchrun: starting it again when it dies, stopping it, and saying what became of it."""

import logging
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed.launcher.api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from titanlike.distributed.environment import EXIT_RANK_MISSING, Job

MISTAKE = 2  # said in one sentence by the process itself, and the same after a restart
STOPPED = [128 + number for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)]  # as it was told
# torchrun's own, and the one that Slurm's --signal=USR1@120 sends ahead of the end.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def torchrun(job: Job, program: list[str], grace: int) -> int:
    """Start the processes and wait for them. The exit code of what failed first, or 128 + the signal to stop."""
    # What went wrong is said here, in one line; torchrun's own would stand between the user and the program's message.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    torch.distributed.launcher.api.LocalElasticAgent = _agent(grace)  # type: ignore[misc]
    if job.num_nodes == 1:
        rendezvous = ["--standalone"]
    else:
        rendezvous = [
            f"--nnodes={job.num_nodes}",
            f"--node-rank={job.node_rank}",
            f"--master-addr={job.master_address}",
            f"--master-port={job.master_port}",
        ]
    options = [
        f"--nproc-per-node={job.processes}",
        f"--max-restarts={job.max_restarts}",
        f"--signals-to-handle={SIGNALS}",
    ]
    try:
        run(parse_args([*rendezvous, *options, *program]))
    except ChildFailedError as error:
        failure = _cause(error.failures.values())
        rank = next(rank for rank, other in error.failures.items() if other is failure)
        _say_how_it_ended(rank, failure.exitcode, job.max_restarts)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


def _agent(grace: int) -> type[LocalElasticAgent]:
    """torchrun's overseer of the processes, which besides waits for a last save and knows when a restart is no help."""

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and self._remaining_restarts:
                failure = _cause(result.failures.values())
                if failure.exitcode == MISTAKE or failure.exitcode in STOPPED:
                    self._remaining_restarts = 0
                else:
                    rank = next(rank for rank, other in result.failures.items() if other is failure)
                    limit = worker_group.spec.max_restarts
                    count = limit - self._remaining_restarts + 1
                    print(
                        f"warning: {_how(rank, failure.exitcode)}; starting again (restart {count} of {limit})",
                        file=sys.stderr,
                        flush=True,
                    )
            return result

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = grace) -> None:
            # Here and not by torchrun's option: 2.11 has none.
            if self._pcontext:
                begun = time.monotonic()
                try:
                    self._pcontext.close(death_sig, grace)
                except SignalException as again:  # a second Ctrl-C, say, at which they leave at once
                    death_sig = again.sigval
                    self._pcontext.close(death_sig, grace)
                if time.monotonic() - begun >= grace:
                    print(
                        f"error: the processes had not ended {grace} seconds after {death_sig.name} and were killed; what "
                        "they were saving is lost, the checkpoints before it are not; run.shutdown_timeout gives more time",
                        file=sys.stderr,
                    )
            super()._shutdown(death_sig)

    return Agent


def _cause(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """The failure that the others followed from: a process that has reported its cause, else one that was killed (the others
    fail because they lose the connection to it, and may be seen to have ended first), else the first."""
    ordered = sorted(failures, key=lambda failure: failure.timestamp)
    reported = [failure for failure in ordered if failure.exitcode in (MISTAKE, EXIT_RANK_MISSING)]
    killed = [failure for failure in ordered if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM]
    return (reported or killed or ordered)[0]


def _how(rank: int, code: int) -> str:
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"process {rank} was ended by {names.get(-code, f'signal {-code}')}"
    return f"process {rank} ended with exit code {code}; its own words are above"


def _say_how_it_ended(rank: int, code: int, max_restarts: int) -> None:
    """One line at the end, where the process has not said it all itself."""
    if code == MISTAKE or code in STOPPED:
        return
    used_up = f"all of MAX_RESTARTS={max_restarts} are used up" if max_restarts else ""
    if code != EXIT_RANK_MISSING:
        print("error: " + "; ".join(filter(None, (_how(rank, code), used_up))), file=sys.stderr)
    elif used_up:
        print(f"error: {used_up}", file=sys.stderr)
