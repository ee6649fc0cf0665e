"""Gradient norms over all shards and pipeline stages, and gradient clipping."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.distributed import collectives
from titanlike.utils.dtensor import local_tensor, shard_groups


class Norms(NamedTuple):
    """How large the gradients are."""

    total: Tensor  # the norm of all of them together
    parts: Tensor  # the norm of this rank's part of each
    names: list[str]


@torch.no_grad()
def gradient_norms(model: nn.Module, pipeline: DeviceMesh | None = None) -> Norms:
    """Norms over all shards, and over the ranks of a pipeline that hold other blocks."""
    copies = getattr(model, "copies", {})  # counted where their original is
    shards: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = {}  # by the groups of ranks that have the others
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name not in copies:
            groups = shard_groups(parameter.grad)
            shards.setdefault(groups, {})[name] = local_tensor(parameter.grad)
    parts = [torch.stack(torch._foreach_norm(list(some.values()))).float() for some in shards.values()]
    squares = [
        collectives.all_reduce_sum(some.square().sum(), groups) for some, groups in zip(parts, shards, strict=True)
    ]
    across = [] if pipeline is None else [pipeline.get_group()]
    total = collectives.all_reduce_sum(torch.stack(squares).sum(), across).sqrt()
    return Norms(total, torch.cat(parts), [name for some in shards.values() for name in some])


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale the gradients down so that their norm, which is `norm` now, is `max_norm` at most."""
    gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
