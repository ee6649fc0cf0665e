"""The process group: joining it, agreeing over it, leaving it. The only file that starts torch.distributed."""

import datetime
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from titanlike.config import UserError
from titanlike.distributed import environment
from titanlike.utils import system

T = TypeVar("T")


@contextmanager
def session(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    deterministic: bool = False,
    timeout: float = 600.0,
    shutdown_message: Callable[[], str] = lambda: "stopped",
) -> Iterator[torch.device]:
    """Join the process group, and barrier_and_exit it at the end. A user's mistake ends the process without a stack trace, and so
    does Ctrl-C, with `shutdown_message`. A collective fails after `timeout` seconds."""
    try:
        chosen = _join(device, timeout)
        # Until here Ctrl-C ended the process by itself, even where it waits inside torch for ranks that do not come.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if deterministic:
            system.set_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
            torch.use_deterministic_algorithms(True)
        yield chosen
        barrier()  # barrier_and_exit together: a rank that still talks to one that has left may be ended by it
    except UserError as error:
        environment.fail(error)
    except KeyboardInterrupt:
        if is_main():
            print(shutdown_message(), file=sys.stderr, flush=True)
        os._exit(130)  # at once, whatever is under way
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(device: str, timeout: float) -> torch.device:
    ranks = environment.ranks()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "run.device = 'cuda', but torch finds no GPU here; set run.device = 'cpu', or install torch for CUDA"
        )
    if device == "auto" and not torch.cuda.is_available() and system.num_gpus():
        raise UserError(
            f"this machine has {system.num_gpus()} GPU(s) that the installed torch {torch.__version__} cannot use; "
            "install torch for CUDA, or set run.device = 'cpu'"
        )
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu and ranks.local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{ranks.local_world_size} processes on this machine, but {torch.cuda.device_count()} GPU(s): one each; "
            f"set NPROC={torch.cuda.device_count()}, or run.device = 'cpu'"
        )
    chosen = torch.device("cuda", ranks.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(chosen)
    else:
        system.keep_freed_memory()
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout)}
    if not ranks.started_by_launcher:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # alone: no port, no address, no waiting
    system.set_variables({"TORCH_FR_BUFFER_SIZE": "2000"})  # collectives that torch can tell of after a hang
    try:
        if environment.launch_id() and environment.restarts().count:
            options |= _fresh_store(options["timeout"])
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", **options)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise UserError(
                "MASTER_PORT is in use on this machine, perhaps by an earlier job; end that one, or set MASTER_PORT to a "
                "free port"
            ) from None
        raise
    return chosen


def _fresh_store(timeout: datetime.timedelta) -> dict[str, Any]:
    """Our part of torchrun's store for this restart. Over several machines torchrun keeps one store for all starts, and with
    it the addresses of processes that are no more. Only for our own launcher, which counts alike on every machine."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    part = dist.PrefixStore(f"restart-{environment.restarts().count}", store)
    return {"store": part, "rank": rank, "world_size": world_size}


def is_main() -> bool:
    """Whether this rank is the one that writes and prints."""
    return dist.get_rank() == 0


def rank() -> int:
    """This rank's number."""
    return dist.get_rank()


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size()


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, on every rank: of a group, or of all."""
    box: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(box, value, group=group)
    return box


def barrier_and_exit(code: int) -> NoReturn:
    """End this process when all ranks have come this far: one that still talks to one that has left may be ended by it."""
    barrier()
    sys.exit(code)


def warn(text: str) -> None:
    """Tell the user what is not right and does not stop the run. Once: rank 0 says it."""
    if is_main():
        print(f"warning: {text}", file=sys.stderr, flush=True)


def assert_equal_across_ranks(what: str, value: T) -> T:
    """The value, after making sure that every rank has the same: machines that differ would train on a mixture."""
    for rank, other in enumerate(all_gather_object(value)):
        if other != value:
            raise UserError(
                f"{what} is not the same on all ranks: {value} here, {other} on rank {rank}; make them equal"
            )
    return value


def connect_to_store() -> Store:
    """The job's key-value store, for a thread: through a connection of its own where there are connections."""
    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def barrier() -> None:
    """Wait until every rank is here."""
    dist.barrier()
