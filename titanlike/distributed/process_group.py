"""The process group: initialization, object collectives and shutdown. The only module that initializes torch.distributed."""

import datetime
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from titanlike.config import UserError
from titanlike.distributed import environment
from titanlike.distributed.command_line import exit_if_output_failed
from titanlike.distributed.end_of_job import announce_end
from titanlike.utils import compat, system
from titanlike.utils.live_line import print_line

T = TypeVar("T")

PEER_ENDED = re.compile(r"gloo\S*\] .*(Connection (closed|reset) by peer( \[\S+\]:\d+)?)")


@contextmanager
def session(
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    *,
    deterministic: bool = False,
    timeout: float = 600.0,
    shutdown_message: Callable[[], str] = lambda: "stopped",
    option: str = "run.device",
) -> Iterator[torch.device]:
    """Initializes the process group and destroys it at the end.

    A `UserError` ends the process with its message, Ctrl-C with `shutdown_message`, and output that cannot be written with an exit
    code, all without a stack trace.

    Args:
        device: "auto" selects the GPU with this process's local rank if there is one.
        deterministic: Uses deterministic algorithms, and raises an error where there is none.
        timeout: Seconds after which a collective fails.
        shutdown_message: Returns the message to print after Ctrl-C.
        option: The key or option that sets the device, for errors.
    """
    is_failing = True
    try:
        chosen = select_device(device, option)
        store = _init_process_group(chosen, timeout)
        # Until here Ctrl-C ends the process at once, even while torch waits for other ranks.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if deterministic:
            system.set_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
            torch.use_deterministic_algorithms(True)
        yield chosen
        barrier()  # a rank that still communicates may fail if a peer has exited
        is_failing = False
        if store and is_main():
            announce_end(store)
    except UserError as error:
        if not dist.is_initialized() or world_size() == 1:
            environment.fail(error)
        environment.print_error(error)
        # Without finalizing the interpreter: a thread of gloo that then releases a tensor, as its collective ends or fails, would
        # abort this process with SIGABRT (pytorch/pytorch#190489).
        with suppress(OSError):  # a closed pipe
            sys.stdout.flush()
        os._exit(2)
    except OSError as error:
        exit_if_output_failed(error)
        raise
    except RuntimeError as error:  # of gloo, which has no type for it
        if not (found := PEER_ENDED.search(str(error))):
            raise
        time.sleep(environment.ERROR_DELAY)  # in which the launcher ends this process, and the rank that failed reports
        rank = environment.rank_info().rank
        environment.print_error(UserError(f"rank {rank} lost the connection to another rank: {found[1]}"))
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(1)
    except KeyboardInterrupt:
        if is_main():
            print(shutdown_message(), file=sys.stderr, flush=True)
        os._exit(130)  # does not wait for other threads
    finally:
        if dist.is_initialized():
            _destroy_process_group(abort=is_failing)


def select_device(name: str, option: str) -> torch.device:
    """Returns the device of this process. Raises `UserError`, which calls the setting `option`, if there is none."""
    ranks = environment.rank_info()
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UserError(f"{option} = 'cuda', but torch finds no GPU; set {option} = 'cpu', or install torch for CUDA")
    if name == "auto" and not has_cuda and system.num_gpus():
        raise UserError(
            f"this machine has {system.num_gpus()} GPU(s) that the installed torch {torch.__version__} cannot use; "
            f"install torch for CUDA, or set {option} = 'cpu'"
        )
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise UserError(f"{option} = 'mps', but torch finds no Apple GPU; set {option} = 'auto'")
        if ranks.world_size > 1:
            raise UserError(f"{option} = 'mps' is for one process, not {ranks.world_size}; set {option} = 'cpu'")
        return torch.device("mps")
    if name == "cpu" or not has_cuda:
        system.keep_freed_memory()
        return torch.device("cpu")
    if ranks.local_world_size > (count := torch.cuda.device_count()):
        raise UserError(
            f"{ranks.local_world_size} processes on this machine, but {count} GPU(s): each process needs one; set NPROC={count}, "
            f"or {option} = 'cpu'; tasks of srun need all GPUs of their node (--gpus-per-node)"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def _init_process_group(device: torch.device, timeout: float) -> Store | None:
    """Initializes the process group. Returns the store of an elastic job, in which processes wait that are not in the group."""
    ranks = environment.rank_info()
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout)}
    store = None
    if device.type == "cuda":
        # NCCL connects now rather than at the first collective, and derives the communicators of subgroups from this one.
        options["device_id"] = device
        # Pipeline stages send and receive one by one, activations and gradients on a communicator each, in an order that is tested:
        # torch would warn of it in every run.
        system.set_variables({"TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0"})
    system.raise_open_file_limit()
    system.set_variables({"TORCH_FR_BUFFER_SIZE": "2000"})  # collectives in a flight record
    try:
        if not ranks.started_by_launcher:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # opens no port
        elif ranks.is_elastic or (ranks.launch_id and ranks.restart_count):
            store, rank, world_size = next(dist.rendezvous("env://", timeout=options["timeout"]))
            options |= {"store": store, "rank": rank, "world_size": world_size}
            if not ranks.is_elastic:
                # Over several nodes torchrun keeps one store for all restarts, with the addresses of processes that have ended.
                # Only under our launcher are restart counts equal on all nodes.
                options["store"] = dist.PrefixStore(f"restart-{ranks.restart_count}", store)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **options)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise UserError(
                "MASTER_PORT is in use on this machine, perhaps by an earlier job; end that job, or set MASTER_PORT to a free "
                "port"
            ) from None
        raise
    return store if ranks.is_elastic else None


def _destroy_process_group(*, abort: bool) -> None:
    """Destroys all process groups. With `abort`, NCCL does not wait for collectives that a failed rank never joins."""
    if abort:
        compat.abort_process_groups()
    else:
        dist.destroy_process_group()


# By the ranks of all groups of a partition, which are the same on every rank, or by a group's ranks and the name of its copy.
_subgroups: dict[tuple[Any, ...], Any] = {}


def subgroup(partition: Sequence[Sequence[int]], name: str | None = None) -> dist.ProcessGroup:
    """Returns the group that contains this rank, of groups that partition all ranks. All ranks call this together. Traces name
    the collectives of a new group.

    All meshes of a process share their groups: DTensor caches results by the ranks of a mesh, so that a second mesh with groups of
    its own would get the first mesh's groups for some tensors, on some ranks.
    """
    if len(partition) == 1:
        return cast(dist.ProcessGroup, dist.group.WORLD)
    key = tuple(map(tuple, partition))
    return _group_of(key, next(list(each) for each in key if dist.get_rank() in each), name)


def copy_of(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Returns a group of the same ranks with a communicator of its own, the same one for each name. All ranks call this together,
    each with its group of one partition."""
    ranks = dist.get_process_group_ranks(group)
    return _group_of((*ranks, name), ranks, name)


def _group_of(key: tuple[Any, ...], ranks: list[int], name: str | None) -> dist.ProcessGroup:
    if not compat.exists(_subgroups.get(key)):  # not created yet, or destroyed since
        # Every rank creates its own group only. NCCL splits the communicator of all ranks once, into all groups of the partition;
        # a call for each group would be a split each, in which all ranks take part.
        _subgroups[key] = dist.new_group(ranks, timeout=_timeout(), use_local_synchronization=True, group_desc=name)
    return cast(dist.ProcessGroup, _subgroups[key])


def copy_of_world() -> dist.ProcessGroup | None:
    """Returns a new gloo group of all ranks, for use by another thread. None in a single process."""
    if dist.get_world_size() == 1:
        return None
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_timeout()))


def _timeout() -> datetime.timedelta | None:
    """Returns the timeout of the job's group. New groups would have torch's default, half an hour."""
    return cast(datetime.timedelta | None, compat.timeout_of(dist.group.WORLD))


def is_main() -> bool:
    """Whether this is rank 0, which prints and writes files for all ranks."""
    return dist.get_rank() == 0


def rank() -> int:
    """Returns the rank of this process."""
    return dist.get_rank()


def world_size() -> int:
    """Returns the number of ranks."""
    return dist.get_world_size()


def _group_without_timeout() -> dist.ProcessGroup:
    """Returns a group of all ranks in which they wait beyond the timeout of collectives. They notice there if a rank exits. If its
    host goes down, the watchdog ends the job."""
    if world_size() == 1:
        return cast(dist.ProcessGroup, dist.group.WORLD)
    key = ("without timeout",)
    if not compat.exists(_subgroups.get(key)):
        _subgroups[key] = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))
    return cast(dist.ProcessGroup, _subgroups[key])


@contextmanager
def waiting_for_all() -> Iterator[None]:
    """Waits at the end of a block until all ranks have left it, even beyond the timeout of collectives."""
    group = _group_without_timeout()
    yield
    all_gather_object(None, group)


def run_on_main(function: Callable[[], object]) -> None:
    """Runs a function on rank 0. The others wait for it, even beyond the timeout of collectives. All raise its `UserError`."""
    errors = [""]
    group = _group_without_timeout()
    if is_main():
        try:
            function()
        except UserError as failure:
            errors = [str(failure)]
    dist.broadcast_object_list(errors, src=0, group=group)
    if errors[0]:
        raise UserError(errors[0])


def broadcast_object(value: T) -> T:
    """Returns rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the values of all ranks of a group, by default of the job, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def assert_equal_across_ranks(name: str, value: T) -> T:
    """Returns the value. Raises `UserError` if a rank has another one: the ranks would train on a mixture."""
    for rank, other in enumerate(all_gather_object(value)):
        if other != value:
            raise UserError(
                f"{name} differs across ranks: {value} on this rank, {other} on rank {rank}; make them equal"
            )
    return value


def barrier() -> None:
    """Waits for all ranks."""
    dist.barrier()


def barrier_and_exit(code: int) -> NoReturn:
    """Exits after a barrier: a rank that still communicates may fail if a peer has exited."""
    barrier()
    sys.exit(code)


def announce(activity: str) -> None:
    """Prints what a run does before its first step, on rank 0."""
    if is_main():
        print_line(f"start   {activity}")


def warn(text: str) -> None:
    """Prints a warning on rank 0."""
    if is_main():
        print_line(f"warning: {text}", sys.stderr)


def connect_to_store() -> Store:
    """Returns the job's key-value store for use by another thread, with its own connection."""
    store = compat.default_store()
    return store.clone() if hasattr(store, "clone") else store
