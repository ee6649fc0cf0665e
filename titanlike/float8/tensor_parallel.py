"""Float8 with tensor and context parallelism: shards share one scale, and all-gathers before float8 matmuls send float8.

The all-gather before a float8 matmul, in the forward or backward pass, sends one byte per element instead of two for bfloat16.
Reductions stay in high precision.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.distributed.collectives import all_gather_no_grad, reduce_scatter_no_grad, resolve_group
from titanlike.float8.linear import GRADIENT, INPUT, Float8Linear, Float8TrainingTensor, float8_dtype, to_float8


def share_scales(model: nn.Module, tensor: dist.ProcessGroup, context: dist.ProcessGroup) -> None:
    """Computes scales over the tensor- and context-parallel groups, and replaces tensor-parallel collectives whose results
    only float8 matmuls read."""
    weight_groups = (tensor.group_name,) if tensor.size() > 1 else ()
    batch_groups = (*weight_groups, *((context.group_name,) if context.size() > 1 else ()))
    modules: list[Any] = list(model.modules())
    first = next((module for module in modules if _is_tensorwise(module)), None)
    if not batch_groups or first is None:
        return
    mm_config = first.linear_mm_config

    # One object of each for all modules: all blocks share one compiled forward. Compiled code keeps names of groups.
    def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        return _AllGather.apply(x, dim, group.group_name, mm_config, batch_groups)

    def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        return _ReduceScatter.apply(x, dim, group.group_name, mm_config, batch_groups)

    for module in modules:
        if isinstance(module, Float8Linear):
            module.weight_groups, module.batch_groups = weight_groups, batch_groups
        style = getattr(module, "style", None)  # set by tensor parallelism
        if style is not None and style.input_layout == "all_gather" and _feeds_float8(module):
            module.all_gather_input = gather
        if style is not None and style.reduce_output and _is_tensorwise(module):
            module.reduce_scatter_output = scatter


def _feeds_float8(module: nn.Module) -> bool:
    """Whether only float8 matmuls read the module's gathered input: its own, or those of its colwise children."""
    linears: list[Any] = [child for child in module.children() if isinstance(child, nn.Linear)]
    colwise = [linear for linear in linears if not linear.style.reduce_output]
    return all(_is_tensorwise(linear) for linear in colwise or [module])


def _is_tensorwise(module: nn.Module) -> bool:
    return isinstance(module, Float8Linear) and module.is_tensorwise


@torch._dynamo.allow_in_graph
class _AllGather(torch.autograd.Function):
    """All-gathers in float8 with a shared scale. The backward pass reduce-scatters in high precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, mm_config: Any, groups: tuple[str, ...]) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather_bytes(to_float8(x, INPUT, mm_config, groups), dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return reduce_scatter_no_grad(gradient, ctx.dim, resolve_group(ctx.group)), None, None, None, None


@torch._dynamo.allow_in_graph
class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatters in high precision. The backward pass all-gathers in float8, for the float8 matmul before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, mm_config: Any, groups: tuple[str, ...]) -> Tensor:
        ctx.dim, ctx.group, ctx.mm_config, ctx.groups = dim, group, mm_config, groups
        return reduce_scatter_no_grad(x, dim, resolve_group(group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        local = to_float8(gradient, GRADIENT, ctx.mm_config, ctx.groups)
        return _all_gather_bytes(local, ctx.dim, ctx.group), None, None, None, None


def _all_gather_bytes(local: Any, dim: int, group: str) -> Tensor:
    """All-gathers a float8 tensor as bytes: not every backend supports float8."""
    role = local._gemm_input_role
    data = all_gather_no_grad(local._data.view(torch.uint8), dim, resolve_group(group)).view(float8_dtype(role))
    return Float8TrainingTensor(data, local._scale, local._orig_dtype, local._linear_mm_config, role)
