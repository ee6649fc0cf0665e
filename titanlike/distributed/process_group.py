"""The process group: joining it, agreeing over it, leaving it. The only file that starts torch.distributed."""

import datetime
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group

from titanlike.distributed import environment
from titanlike.config import UserError
from titanlike.utils.dtensor import is_dtensor

T = TypeVar("T")


@contextmanager
def session(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    deterministic: bool = False,
    timeout: float = 600.0,
    farewell: Callable[[], str] = lambda: "stopped",
) -> Iterator[torch.device]:
    """Join the process group, and leave it at the end. A user's mistake ends the process without a stack trace, and so
    does Ctrl-C, with `farewell`. A collective fails after `timeout` seconds."""
    try:
        chosen = _join(device, timeout)
        # Until here Ctrl-C ended the process by itself, even where it waits inside torch for ranks that do not come.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if deterministic:
            environment.set_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
            torch.use_deterministic_algorithms(True)
        yield chosen
        barrier()  # leave together: a rank that still talks to one that has left may be ended by it
    except UserError as error:
        environment.fail(error)
    except KeyboardInterrupt:
        if is_main():
            print(farewell(), file=sys.stderr, flush=True)
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
    if device == "auto" and not torch.cuda.is_available() and environment.num_gpus():
        raise UserError(
            f"this machine has {environment.num_gpus()} GPU(s) that the installed torch {torch.__version__} cannot use; "
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
        environment.keep_freed_memory()
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout)}
    if not ranks.started_by_launcher:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # alone: no port, no address, no waiting
    environment.set_variables({"TORCH_FR_BUFFER_SIZE": "2000"})  # collectives that torch can tell of after a hang
    try:
        if environment.launchers_stamp() and environment.restarts().count:
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


def agree(value: T) -> T:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, on every rank: of a group, or of all."""
    box: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(box, value, group=group)
    return box


def leave(code: int) -> NoReturn:
    """End this process when all ranks have come this far: one that still talks to one that has left may be ended by it."""
    barrier()
    sys.exit(code)


def warn(text: str) -> None:
    """Tell the user what is not right and does not stop the run. Once: rank 0 says it."""
    if is_main():
        print(f"warning: {text}", file=sys.stderr, flush=True)


def same_everywhere(what: str, value: T) -> T:
    """The value, after making sure that every rank has the same: machines that differ would train on a mixture."""
    for rank, other in enumerate(gather(value)):
        if other != value:
            raise UserError(
                f"{what} is not the same on all ranks: {value} here, {other} on rank {rank}; make them equal"
            )
    return value


def store_of_its_own() -> Store:
    """The job's key-value store, for a thread: through a connection of its own where there are connections."""
    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def barrier() -> None:
    """Wait until every rank is here."""
    dist.barrier()


def sum_over(tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The sum over one group of ranks after the other, in place, without the host waiting for it on a GPU."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


# torch 2.13 has new names for these, and warnings for the old ones.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def gather_along(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank's tensor, one after the other along `dim`. Each rank's gradient is the sum of what all make of its part."""
    return _Gather.apply(tensor, dim, group)


def scatter_sum_along(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, of which each gets its share along `dim`. The gradient is that of all shares."""
    return _ScatterSum.apply(tensor, dim, group)


def named_group(name: str) -> dist.ProcessGroup:
    """The group of this name: compiled code keeps names."""
    return _resolve_process_group(cast(Any, name))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as plain memory."""
    mine = tensor.to_local() if is_dtensor(tensor) else tensor
    return getattr(mine, "stored", mine)  # of a shard that FSDP gathers in float8


def sharers(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that have other parts of the tensor."""
    if not is_dtensor(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_plain(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sum_plain(gradient, ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return scatter_sum_plain(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_plain(gradient, ctx.dim, ctx.group), None, None


def scatter_sum_plain(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`scatter_sum_along` without a gradient."""
    return collectives.wait_tensor(_reduce_scatter(tensor.contiguous(), "sum", dim, group))


def gather_plain(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`gather_along` without a gradient."""
    # Along the first dimension, then moved: torch 2.11 cannot compile its own way of gathering along another one.
    gathered = collectives.wait_tensor(_all_gather(tensor.contiguous(), 0, group))
    return torch.cat(gathered.chunk(group.size()), dim) if dim else gathered
