"""Float8 with tensor and context parallelism: shards share one scale, and all-gathers before float8 matmuls send float8.

The largest absolute values of all sharded weights are reduced together, after each optimizer step; activations are reduced when
they are cast. The all-gather before a float8 matmul, in the forward or backward pass, sends one byte per element instead of two for
bfloat16. Reductions stay in high precision.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.distributed.autograd_collectives import all_gather_no_grad, reduce_scatter_no_grad
from titanlike.float8.all_gather import Float8Shard
from titanlike.float8.linear import GRADIENT, INPUT, Float8TrainingTensor, float8_dtype, matmul_of, to_float8
from titanlike.float8.weight_maxima import WeightChanges, weight_maxima
from titanlike.utils.compat import all_gather, resolve_process_group, wait_tensor
from titanlike.utils.modules import without_owner


def share_scales(
    model: nn.Module, tensor: dist.ProcessGroup, context: dist.ProcessGroup | None = None, *, overlap: bool = False
) -> None:
    """Computes scales over the tensor- and context-parallel groups, and replaces tensor-parallel collectives whose results
    only float8 matmuls read. Call it after `apply_float8` and `apply_tensor`, for the module that is called: weights that have
    changed are read when its forward pass starts. `overlap`: with async tensor parallelism."""
    batch_groups = tuple(group.group_name for group in (tensor, context) if group and group.size() > 1)
    modules: list[Any] = list(model.modules())
    linears: list[Any] = [module for module in modules if _is_tensorwise(module)]
    if not batch_groups or not linears:
        return
    mm_config = matmul_of(linears[0]).mm_config  # type: ignore[union-attr]
    if tensor.size() > 1:
        changes = WeightChanges()
        model.register_forward_pre_hook(partial(_update_maxima, linears, changes))
        for linear in linears:
            linear.register_load_state_dict_post_hook(changes.mark)

    # One object of each for all modules: all blocks share one compiled forward. Compiled code keeps names of groups.
    def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        return _AllGather.apply(x, dim, group.group_name, mm_config, batch_groups, overlap)

    def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        return _ReduceScatter.apply(x, dim, group.group_name, mm_config, batch_groups, overlap)

    for module in modules:
        if (matmul := matmul_of(module)) is not None:
            matmul.batch_groups = batch_groups
        style = getattr(module, "style", None)  # of tensor parallelism
        if style is not None and style.input_layout == "all_gather" and _feeds_float8(module):
            module.set_collectives(all_gather_input=gather)
        if style is not None and style.reduce_output == "reduce_scatter" and _is_tensorwise(module):
            module.set_collectives(reduce_scatter_output=scatter)


def _update_maxima(linears: Sequence[Any], changes: WeightChanges, *hook_args: object) -> None:
    """Reads the weights if they have changed, except those that FSDP all-gathers in float8, which have scales already.

    A registered parameter has its data, whether or not FSDP has gathered it: FSDP registers either its shard or the full weight.
    """
    if changes.since_last():
        modules = [linear for linear in linears if not _is_float8(linear._parameters["weight"])]
        for indices, amax in weight_maxima([module._parameters["weight"] for module in modules]):
            for index, value in zip(indices, amax.unbind(), strict=True):
                matmul_of(modules[index]).weight_amax = value  # type: ignore[union-attr]


def _is_float8(weight: Any) -> bool:
    return isinstance(getattr(weight, "_local_tensor", weight), Float8Shard | Float8TrainingTensor)


def _feeds_float8(module: nn.Module) -> bool:
    """Whether only float8 matmuls read the module's gathered input: its own, or its colwise children's."""
    linears: list[Any] = [child for child in module.children() if isinstance(without_owner(child), nn.Linear)]
    colwise = [linear for linear in linears if not linear.style.reduce_output]
    return all(_is_tensorwise(linear) for linear in colwise or [module])


def _is_tensorwise(module: nn.Module) -> bool:
    matmul = matmul_of(module)
    return matmul is not None and matmul.is_tensorwise


@torch.compiler.allow_in_graph
class _AllGather(torch.autograd.Function):
    """All-gathers in float8 with a shared scale. The backward pass reduce-scatters in high precision."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: str, mm_config: Any, groups: tuple[str, ...], overlap: bool
    ) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather_float8(to_float8(x, INPUT, mm_config, groups), dim, group, overlap)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_no_grad(gradient, ctx.dim, resolve_process_group(ctx.group)), None, None, None, None, None


@torch.compiler.allow_in_graph
class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatters in high precision. The backward pass all-gathers in float8, for the float8 matmul before it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: str, mm_config: Any, groups: tuple[str, ...], overlap: bool
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.mm_config, ctx.groups, ctx.overlap = dim, group, mm_config, groups, overlap
        return reduce_scatter_no_grad(x, dim, resolve_process_group(group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        local = to_float8(gradient, GRADIENT, ctx.mm_config, ctx.groups)
        return _all_gather_float8(local, ctx.dim, ctx.group, ctx.overlap), None, None, None, None, None


def _all_gather_float8(local: Any, dim: int, group_name: str, overlap: bool) -> Tensor:
    role, group = local._gemm_input_role, resolve_process_group(group_name)
    if overlap:  # the form that async tensor parallelism replaces, together with the matmuls that read the result
        chunks = wait_tensor(all_gather(local._data.contiguous(), 0, group)).chunk(group.size())
        data = torch.cat([chunk.view(torch.uint8) for chunk in chunks], dim)
    else:  # as bytes: not every backend supports float8
        data = all_gather_no_grad(local._data.view(torch.uint8), dim, group)
    return Float8TrainingTensor(
        data.view(float8_dtype(role)), local._scale, local._orig_dtype, local._linear_mm_config, role
    )
