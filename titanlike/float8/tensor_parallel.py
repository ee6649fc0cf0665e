"""Float8 between the ranks that share matrices or sequences: one scale for what they share, and less to send.

What is gathered in front of a float8 matrix, or in its backward pass, is gathered as float8: one byte a number where bfloat16
has two. Sums stay in high precision.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.distributed.collectives import all_gather_no_grad, reduce_scatter_no_grad, resolve_group
from titanlike.float8.linear import GRADIENT, INPUT, Float8Linear, Float8TrainingTensor, dtype_of, to_float8


def share_scales(model: nn.Module, tensor: dist.ProcessGroup, context: dist.ProcessGroup) -> None:
    """Find scales over the ranks that share matrices and those that share sequences, and gather tokens in float8 where all
    that is fed by them is a float8 matrix."""
    weight_groups = (tensor.group_name,) if tensor.size() > 1 else ()
    batch_groups = (*weight_groups, *((context.group_name,) if context.size() > 1 else ()))
    modules: list[Any] = list(model.modules())
    first = next((module for module in modules if _has_one_scale(module)), None)
    if not batch_groups or first is None:
        return
    # The same two objects everywhere, so that one compiled block serves all.
    gather = partial(_gather, mm_config=first.linear_mm_config, groups=batch_groups)
    scatter_sum = partial(_scatter_sum, mm_config=first.linear_mm_config, groups=batch_groups)
    for module in modules:
        if isinstance(module, Float8Linear):
            module.weight_groups, module.batch_groups = weight_groups, batch_groups
        style = getattr(module, "style", None)  # where the ranks share matrices
        if style is not None and style.takes == "all tokens" and _feeds_float8(module):
            module.gather = gather
        if style is not None and style.adds_up and _has_one_scale(module):
            module.scatter_sum = scatter_sum


def _feeds_float8(module: nn.Module) -> bool:
    """Whether all that multiplies what the module gathers is float8: itself, or its matrices but those at its end."""
    inside: list[Any] = [child for child in module.children() if isinstance(child, nn.Linear)]
    inside = [matrix for matrix in inside if not matrix.style.adds_up]
    return all(_has_one_scale(matrix) for matrix in inside or [module])


def _has_one_scale(module: nn.Module) -> bool:
    return isinstance(module, Float8Linear) and module.has_one_scale


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup, mm_config: Any, groups: tuple[str, ...]) -> Tensor:
    return _Gather.apply(x, dim, group.group_name, mm_config, groups)


def _scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup, mm_config: Any, groups: tuple[str, ...]) -> Tensor:
    return _ScatterSum.apply(x, dim, group.group_name, mm_config, groups)


@torch._dynamo.allow_in_graph
class _Gather(torch.autograd.Function):
    """Every rank's tokens in float8, with one scale; the gradient's sum is scattered in high precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, mm_config: Any, groups: tuple[str, ...]) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(to_float8(x, INPUT, mm_config, groups), dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return reduce_scatter_no_grad(gradient, ctx.dim, resolve_group(ctx.group)), None, None, None, None


@torch._dynamo.allow_in_graph
class _ScatterSum(torch.autograd.Function):
    """The sum is scattered in high precision; its gradient is gathered in float8, for the float8 matrix before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, mm_config: Any, groups: tuple[str, ...]) -> Tensor:
        ctx.dim, ctx.group, ctx.mm_config, ctx.groups = dim, group, mm_config, groups
        return reduce_scatter_no_grad(x, dim, resolve_group(group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        mine = to_float8(gradient, GRADIENT, ctx.mm_config, ctx.groups)
        return _gathered(mine, ctx.dim, ctx.group), None, None, None, None


def _gathered(mine: Any, dim: int, group: str) -> Tensor:
    role = mine._gemm_input_role
    # As plain bytes: not every backend knows float8.
    data = all_gather_no_grad(mine._data.view(torch.uint8), dim, resolve_group(group)).view(dtype_of(role))
    return Float8TrainingTensor(data, mine._scale, mine._orig_dtype, mine._linear_mm_config, role)
