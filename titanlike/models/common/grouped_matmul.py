"""Grouped matmul: consecutive rows of one matrix, each group times a matrix of its own.

The operators are opaque to the compiler: torch's own, where it exists, cannot be traced with all dtypes and devices, and the loop
over groups reads their sizes on the host.

Shapes: M rows, E groups, N outputs, K inputs.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from titanlike.utils import compat

ALIGNMENT = 16  # bytes of a row, which torch's kernels require


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns (M, N): the rows of x (M, K), each multiplied by the matrix (N, K) of its group in `weight` (E, N, K).

    Args:
        ends: the index after the last row of each group (E,), in int32. The groups cover all rows. There may be no rows.
    """
    return _grouped_matmul(x, weight, ends)


@torch.library.custom_op("titanlike::grouped_matmul", mutates_args=())
def _grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.shape[0] == 0:  # torch's kernels are not tested with it
        return x.new_empty(0, weight.shape[1])
    if _has_kernel(x, *weight.shape[-2:]):
        return compat.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    for index, rows in enumerate(_slices(ends)):
        torch.mm(x[rows], weight[index].t(), out=out[rows])
    return out


@torch.library.custom_op("titanlike::grouped_matmul_weight_gradient", mutates_args=())
def _weight_gradient(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(ends.shape[0], gradient.shape[1], x.shape[1])
    if _has_kernel(gradient, x.shape[-1]):  # for any number of rows, which depends on the data
        return compat.grouped_mm(gradient.t(), x, offs=ends)
    out = x.new_empty(ends.shape[0], gradient.shape[1], x.shape[1])
    for index, rows in enumerate(_slices(ends)):
        torch.mm(gradient[rows].t(), x[rows], out=out[index])
    return out


@_grouped_matmul.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_weight_gradient.register_fake
def _(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], gradient.shape[1], x.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    needs_x, needs_weight, _ = ctx.needs_input_grad
    return (
        torch.ops.titanlike.grouped_matmul(gradient, weight.transpose(-2, -1), ends) if needs_x else None,
        torch.ops.titanlike.grouped_matmul_weight_gradient(gradient, x, ends) if needs_weight else None,
        None,
    )


_grouped_matmul.register_autograd(_backward, setup_context=_setup_context)


def add_bias_of_group(x: Tensor, bias: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
    """Returns x (M, N) plus the bias (E, N) of the group of each row (M,). For `ends`, see `grouped_matmul`."""
    return _AddBias.apply(x, bias, groups, ends)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return bias[groups].add_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            return gradient, None, None, None
        # The sum of the rows of each group, without the atomic additions of the gradient of indexing.
        (ends,) = ctx.saved_tensors
        ones = gradient.new_ones(gradient.shape[0], ALIGNMENT // gradient.element_size())
        sums = torch.ops.titanlike.grouped_matmul_weight_gradient(gradient.contiguous(), ones, ends)  # (E, N, ...)
        return gradient, sums[..., 0], None, None


def _has_kernel(rows: Tensor, *sizes: int) -> bool:
    """Whether torch has a kernel for rows and for matrices of these sizes, which reads the sizes of the groups on the GPU."""
    aligned = all(size * rows.element_size() % ALIGNMENT == 0 for size in (rows.shape[-1], *sizes))
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and compat.grouped_mm is not None


def _slices(ends: Tensor) -> list[slice]:
    """Returns the rows of each group."""
    bounds = [0, *ends.tolist()]
    return [slice(start, end) for start, end in pairwise(bounds)]
