"""Differentiable collectives on plain tensors, and the same without a gradient."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.utils import compat


def all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the tensors of all ranks along `dim`. The backward pass reduce-scatters the gradient."""
    return _Collective.apply(tensor, "all_gather", "reduce_scatter", dim, group)


def all_gather_by_cat(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`all_gather` in the form that async tensor parallelism replaces, together with the matmuls that read the result."""
    return _Collective.apply(tensor, "all_gather_by_cat", "reduce_scatter", dim, group)


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sums over ranks and returns this rank's chunk along `dim`. The backward pass all-gathers the gradient."""
    return _Collective.apply(tensor, "reduce_scatter", "all_gather", dim, group)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums over ranks. The backward pass returns the gradient, which is the same on all ranks."""
    return _Collective.apply(tensor, "all_reduce", "identity", 0, group)


def all_reduce_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the tensor, which is the same on all ranks. The backward pass sums its gradient over ranks."""
    return _Collective.apply(tensor, "identity", "all_reduce", 0, group)


def split(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's chunk along `dim` of a tensor that all ranks hold. The backward pass all-gathers the gradient."""
    return _Collective.apply(tensor, "split", "all_gather", dim, group)


def gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the tensors of all ranks along `dim`. The backward pass returns this rank's chunk of the gradient, which is the
    same on all ranks."""
    return _Collective.apply(tensor, "all_gather", "split", dim, group)


def all_to_all(tensor: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends consecutive rows to each rank, and returns those that it receives from each, in order. The backward pass sends their
    gradients back.

    Args:
        received: number of rows from each rank.
        sent: number of rows to each rank.
    """
    return _AllToAll.apply(tensor, received, sent, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return compat.wait_tensor(compat.all_to_all(tensor.contiguous(), received, sent, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent = ctx.sizes
        return compat.wait_tensor(compat.all_to_all(gradient.contiguous(), received, sent, ctx.group)), None, None, None


class _Collective(torch.autograd.Function):
    """One of `_COLLECTIVES` in the forward pass, another in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: str, backward: str, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.backward_name, ctx.dim, ctx.group = backward, dim, group
        return _COLLECTIVES[forward](tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _COLLECTIVES[ctx.backward_name](gradient, ctx.dim, ctx.group), None, None, None, None


def reduce_scatter_no_grad(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`reduce_scatter` without a gradient."""
    outer = tensor.shape[:dim]
    if math.prod(outer) == 1:  # such as a batch of one sequence: the chunks are contiguous, and need no copy
        local = compat.reduce_scatter(tensor.contiguous().view(tensor.shape[dim:]), "sum", 0, group)
        return compat.wait_tensor(local).view(*outer, *local.shape)
    return compat.wait_tensor(compat.reduce_scatter(tensor.contiguous(), "sum", dim, group))


def all_gather_no_grad(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`all_gather` without a gradient."""
    outer = tensor.shape[:dim]
    if math.prod(outer) == 1:  # as above
        gathered = compat.wait_tensor(compat.all_gather(tensor.contiguous().view(tensor.shape[dim:]), 0, group))
        return gathered.view(*outer, *gathered.shape)
    return _all_gather_by_cat_no_grad(tensor, dim, group)


def _all_gather_by_cat_no_grad(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    # Gathers along dimension 0 first: torch 2.11 cannot compile an all-gather along another dimension.
    gathered = compat.wait_tensor(compat.all_gather(tensor.contiguous(), 0, group))
    return torch.cat(gathered.chunk(group.size()), dim)


def all_reduce_no_grad(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """`all_reduce` without a gradient."""
    return compat.wait_tensor(compat.all_reduce(tensor.contiguous(), "sum", group))


def _split_no_grad(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), dim)[group.rank()].clone()


def _identity(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


_COLLECTIVES: dict[str, Callable[[Tensor, int, dist.ProcessGroup], Tensor]] = {
    "all_gather": all_gather_no_grad,
    "all_gather_by_cat": _all_gather_by_cat_no_grad,
    "reduce_scatter": reduce_scatter_no_grad,
    "all_reduce": all_reduce_no_grad,
    "split": _split_no_grad,
    "identity": _identity,
}
