"""Processes work units, in this process or in parallel worker processes. No torch.

Worker processes are spawned: a forked copy of the parent would inherit the state of locks that the parent's other threads hold.
They exit when the parent dies, and leave Ctrl-C to the parent.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from titanlike.config import UserError
from titanlike.data.tokens.tokenization import ReportProgress, WorkUnit, WorkUnitResult
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.tools.data.quality.options import WorkerOptions
from titanlike.tools.data.quality.passes import process
from titanlike.utils import system

PROGRESS_INTERVAL = 0.2  # seconds


def process_serially(
    units: Sequence[WorkUnit], job: WorkerOptions, tokenizer: Tokenizer, report: ReportProgress
) -> list[WorkUnitResult | None]:
    """Processes work units in this process. Calls `report` like `process_in_parallel`."""
    read = tokens = 0
    last_report = time.monotonic()

    def add(new_read: int, new_tokens: int) -> None:
        nonlocal read, tokens, last_report
        read += new_read
        tokens += new_tokens
        if time.monotonic() - last_report >= PROGRESS_INTERVAL:
            last_report = time.monotonic()
            report(read, tokens)

    results = [process(unit, job, tokenizer, add) for unit in units]
    report(read, tokens)
    return results


def process_in_parallel(
    units: Sequence[WorkUnit], job: WorkerOptions, num_workers: int, report: ReportProgress
) -> list[WorkUnitResult | None]:
    """Processes work units in `num_workers` processes, which have ended when this function returns or raises.

    Calls `report` every `PROGRESS_INTERVAL` seconds with the bytes read and the tokens made so far.
    """
    context = multiprocessing.get_context("spawn")
    # Process id, bytes read and tokens made of each work unit. Only one process writes to an entry, so no lock is needed.
    status = context.RawArray("q", 3 * len(units))
    earlier = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(num_workers, context, _initialize, (job, status))
    pending: set[Future[WorkUnitResult | None]] = set()
    workers: set[BaseProcess] = set()
    results = []
    try:
        with _spawning():
            for index, unit in enumerate(units):
                pending.add(executor.submit(_run, index, unit))
        workers = set(multiprocessing.active_children()) - earlier
        while pending:
            done, pending = wait(pending, PROGRESS_INTERVAL, FIRST_COMPLETED)
            results += [future.result() for future in done]
            report(sum(status[1::3]), sum(status[2::3]))
    except BrokenProcessPool:
        executor.shutdown()  # waits for the exit codes
        cause = "it ran out of memory" + (f", or --filter {job.quality.own.name} ended it" if job.quality.own else "")
        raise UserError(
            f"{_describe_death(workers, units, status)}, possibly because {cause}; give fewer than {num_workers} "
            "--workers, and the same command resumes"
        ) from None
    finally:
        if pending:
            for worker in set(multiprocessing.active_children()) - earlier:
                worker.kill()
        executor.shutdown(cancel_futures=True)
    return results


@contextmanager
def _spawning() -> Iterator[None]:
    """Prepares this process for spawning workers.

    Workers block SIGINT from their start. They do not import this process's program, which may take seconds: multiprocessing
    imports the file of `__main__`, and a module without a file stands in for it.
    """
    main = sys.modules["__main__"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot start another process ({error.strerror}); give fewer --workers") from None
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _describe_death(workers: set[BaseProcess], units: Sequence[WorkUnit], status: Any) -> str:
    """Describes the end of the process that broke the pool. The pool terminates the others with SIGTERM, or they end with 0."""
    for worker in sorted(workers, key=lambda worker: worker.exitcode == 0):
        code = worker.exitcode
        if code not in (None, -signal.SIGTERM):
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            active = [unit for index, unit in enumerate(units) if status[3 * index] == worker.pid]
            where = "".join(f" while it read {unit.spans[0].file.name} (work unit {unit.number})" for unit in active)
            return f"a worker process {how}{where}"
    return "a worker process ended unexpectedly"


# State of a worker process. An initializer of ProcessPoolExecutor can only set globals.
_state: tuple[WorkerOptions, Tokenizer, Any]


def _initialize(job: WorkerOptions, status: Any) -> None:
    global _state
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # Each process has a core: the library's own threads would compete with the other processes.
    system.set_variables({"TOKENIZERS_PARALLELISM": "false"})
    _state = job, build_tokenizer(job.tokenizer), status


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(index: int, unit: WorkUnit) -> WorkUnitResult | None:
    job, tokenizer, status = _state
    status[3 * index] = os.getpid()

    def report(read: int, tokens: int) -> None:
        status[3 * index + 1] += read
        status[3 * index + 2] += tokens

    try:
        return process(unit, job, tokenizer, report)
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)  # reported as if the kernel had killed the process
        raise
    finally:
        status[3 * index] = 0
