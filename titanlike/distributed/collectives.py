"""Collectives on plain tensors: all-reduce over process groups, and differentiable all-gather and reduce-scatter."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def all_reduce_sum(tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Sums over each group in turn, in place. Does not synchronize a GPU with the host."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


def all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the tensors of all ranks along `dim`. The backward pass reduce-scatters the gradient."""
    return _AllGather.apply(tensor, dim, group)


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sums over ranks and returns this rank's chunk along `dim`. The backward pass all-gathers the gradient."""
    return _ReduceScatter.apply(tensor, dim, group)


def resolve_group(name: str) -> dist.ProcessGroup:
    """Returns the process group with this name. Compiled code refers to groups by name."""
    return _resolve_process_group(cast(Any, name))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_no_grad(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_no_grad(gradient, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter_no_grad(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_no_grad(gradient, ctx.dim, ctx.group), None, None


def reduce_scatter_no_grad(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`reduce_scatter` without a gradient."""
    return collectives.wait_tensor(_reduce_scatter(tensor.contiguous(), "sum", dim, group))


def all_gather_no_grad(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`all_gather` without a gradient."""
    # Gathers along dimension 0 first: torch 2.11 cannot compile an all-gather along another dimension.
    gathered = collectives.wait_tensor(_all_gather(tensor.contiguous(), 0, group))
    return torch.cat(gathered.chunk(group.size()), dim) if dim else gathered
