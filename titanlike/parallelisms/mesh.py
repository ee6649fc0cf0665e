"""The ranks as a named grid: which of them share which part of the work."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config.layout import DIMENSIONS


@dataclass(frozen=True)
class Mesh:
    """The grid of all ranks, and the lines and planes through this one.

    Weights and batches see it differently. Ranks that share a sequence (`context`) have the same weights, so these are
    sharded over them too: to FSDP, `shard` and `context` are one dimension.
    """

    sizes: dict[str, int]  # of all five dimensions
    fsdp: DeviceMesh  # what FSDP shards over, and replicates over where `replicate` is above 1
    tensor: DeviceMesh  # the ranks that share each matrix
    context: DeviceMesh  # the ranks that share each sequence
    pipeline: DeviceMesh  # the ranks that share the blocks
    data_rank: int  # which part of the data this rank reads ...
    num_data_ranks: int  # ... of how many

    @property
    def loss_groups(self) -> list[dist.ProcessGroup]:
        """Groups to sum over, one after the other, for a sum over all tokens of a batch."""
        return [self.fsdp.get_group(dimension) for dimension in range(self.fsdp.ndim)]

    @property
    def vocab_group(self) -> dist.ProcessGroup | None:
        """The ranks that each hold a slice of the logits; None where every rank has them whole."""
        return self.tensor.get_group() if self.sizes["tensor"] > 1 else None


def build_mesh(
    device_type: str, *, pipeline: int = 1, replicate: int = 1, shard: int = 1, context: int = 1, tensor: int = 1
) -> Mesh:
    """The grid of these sizes over all ranks, which are as many as their product.

    `init_device_mesh` would make a process group for every dimension. A group costs memory, time at the start and, with gloo,
    three threads that poll, so dimensions of size 1 share one here.
    """
    names = ("pipeline", "replicate", "shard", "tensor")
    grid = torch.arange(dist.get_world_size()).view(pipeline, replicate, shard * context, tensor)
    alone = dist.group.WORLD if grid.numel() == 1 else None

    def group_of(grid: Tensor, dimension: int) -> dist.ProcessGroup:
        """The ranks on this rank's line along a dimension of the grid."""
        nonlocal alone
        lines = grid.movedim(dimension, -1).flatten(0, -2).tolist()
        if len(lines) == 1:
            return cast(dist.ProcessGroup, dist.group.WORLD)
        if len(lines[0]) > 1:
            return dist.new_subgroups_by_enumeration(lines)[0]
        alone = alone or dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return alone

    groups = [group_of(grid, dimension) for dimension in range(grid.ndim)]
    weights = DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=names)
    shard_groups = group_of(grid.view(-1, context, tensor), 1)
    return Mesh(
        sizes=dict(zip(DIMENSIONS, (pipeline, replicate, shard, context, tensor), strict=True)),
        fsdp=weights["replicate", "shard"] if replicate > 1 else weights["shard"],
        tensor=weights["tensor"],
        context=DeviceMesh.from_group(shard_groups, device_type, mesh_dim_names=("context",)),
        pipeline=weights["pipeline"],
        data_rank=weights["replicate"].get_local_rank() * shard + weights["shard"].get_local_rank() // context,
        num_data_ranks=replicate * shard,
    )
