"""Gradient norms over all shards and pipeline stages, and gradient clipping."""

from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.distributed import collectives
from titanlike.utils.compat import foreach_mul_, foreach_norm
from titanlike.utils.dtensor import local_tensor, shard_groups
from titanlike.utils.modules import copies_of


class Norms(NamedTuple):
    """The gradient norms of a step."""

    total: Tensor  # the global norm, equal on all ranks
    parts: Tensor  # the norm of each local shard
    names: list[str]  # of the parameters, in the order of `parts`


@torch.no_grad()
def gradient_norms(model: nn.Module, pipeline: DeviceMesh | None = None) -> Norms:
    """Computes gradient norms over all shards, and over all stages of a pipeline."""
    copies = copies_of(model)  # the originals count
    by_groups: dict[
        tuple[dist.ProcessGroup, ...], dict[str, Tensor]
    ] = {}  # local gradients by the groups that shard them
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name not in copies:
            by_groups.setdefault(shard_groups(parameter.grad), {})[name] = local_tensor(parameter.grad)
    # In float32, whatever the gradients are: a rounded norm of each shard would depend on the layout.
    parts = [torch.stack(foreach_norm(list(local.values()), dtype=torch.float32)) for local in by_groups.values()]
    squares = [
        collectives.all_reduce_sum(norms.square().sum(), groups) for norms, groups in zip(parts, by_groups, strict=True)
    ]
    stages = [] if pipeline is None else [pipeline.get_group()]
    total = collectives.all_reduce_sum(torch.stack(squares).sum(), stages).sqrt()
    return Norms(total, torch.cat(parts), [name for local in by_groups.values() for name in local])


@torch.no_grad()
def unscale_gradients(model: nn.Module, loss_scale: float) -> None:
    """Divides gradients in place by the factor of the loss, a power of two: nothing is rounded."""
    if loss_scale != 1.0:
        foreach_mul_(_local_gradients(model), 1.0 / loss_scale)


@torch.no_grad()
def clip_gradients(
    model: nn.Module, norm: Tensor, max_norm: float, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Scales gradients, whose global norm is `norm`, to a norm of at most `max_norm`: in place or, where `optimizer` has a
    `scale_in_step`, in its next step."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    later: set[Tensor] = getattr(optimizer, "scale_in_step", lambda factor: set())(factor)
    if now := _local_gradients(model, later):
        foreach_mul_(now, factor)


def _local_gradients(model: nn.Module, excluded: Collection[Tensor] = ()) -> list[Tensor]:
    return [local_tensor(p.grad) for p in model.parameters() if p.grad is not None and p not in excluded]
