"""The device mesh: assigns each rank its coordinates in the parallelism dimensions."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config import UserError
from titanlike.config.layout import DIMENSIONS, infer_shard
from titanlike.distributed import process_group
from titanlike.parallelisms.context import context_position_ids


@dataclass(frozen=True)
class Mesh:
    """The sub-meshes that contain this rank.

    Context-parallel ranks hold the same weights, so FSDP shards over `shard` x `context` as one dimension. Expert parallelism
    divides the same ranks into groups of consecutive ones, each of which has all experts.
    """

    sizes: dict[str, int]  # of all five dimensions
    fsdp: DeviceMesh  # (shard x context), or (replicate, shard x context) where `replicate` is above 1
    tensor: DeviceMesh
    context: DeviceMesh
    pipeline: DeviceMesh
    data_rank: int  # index of this rank's part of the global batch
    num_data_ranks: int
    expert: DeviceMesh | None = (
        None  # (expert,), or (expert, tensor) where `tensor` is above 1; None without expert parallelism
    )
    expert_fsdp: DeviceMesh | None = None  # of the experts of one rank: (expert_shard,), or (replicate, expert_shard)

    @property
    def loss_groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups to all-reduce over in turn, for a sum over all tokens of the global batch."""
        return [self.fsdp.get_group(dimension) for dimension in range(self.fsdp.ndim)]

    def data_shard(self, seq_len: int) -> dict[str, Any]:
        """Returns this rank's part of the global batch and of each sequence: arguments of `build_dataloaders`."""
        return {
            "data_rank": self.data_rank,
            "num_data_ranks": self.num_data_ranks,
            "position_ids": self.position_ids(seq_len),
        }

    @property
    def vocab_group(self) -> dist.ProcessGroup | None:
        """Returns the group over which logits are sharded along the vocabulary, or None where they are not sharded."""
        return self.tensor.get_group() if self.sizes["tensor"] > 1 else None

    def position_ids(self, seq_len: int) -> Tensor:
        """Returns the position ids of this rank's tokens of a sequence, in the order in which the rank holds them."""
        if self.context.size() == 1:
            return torch.arange(seq_len)
        return context_position_ids(seq_len, self.context)


def build_mesh(
    device_type: str,
    *,
    pipeline: int = 1,
    replicate: int = 1,
    shard: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
) -> Mesh:
    """Builds the mesh over all ranks. The product of the sizes, without `expert`, must be the world size; -1 for `shard`
    infers it. `expert` divides `shard` x `context`.

    `init_device_mesh` would create a process group for every dimension. A group costs memory, start-up time and, with gloo,
    three polling threads, so all dimensions of size 1 share one group.
    """
    names = ("pipeline", "replicate", "shard", "tensor")
    sizes = dict(zip(DIMENSIONS, (pipeline, replicate, shard, context, tensor), strict=True))
    if shard == -1:
        sizes["shard"] = shard = infer_shard(sizes, dist.get_world_size())
    if math.prod(sizes.values()) != dist.get_world_size():
        raise UserError(
            f"a mesh of {' x '.join(f'{name} {size}' for name, size in sizes.items())} has {math.prod(sizes.values())} ranks, but "
            f"there are {dist.get_world_size()} processes"
        )
    grid = torch.arange(dist.get_world_size()).view(pipeline, replicate, shard * context, tensor)
    groups = [group_along(grid, dimension, name) for dimension, name in enumerate(names)]
    mesh: Any = DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=names)
    context_group = group_along(grid.view(-1, context, tensor), 1, "context")
    expert_meshes: dict[str, DeviceMesh] = {}
    if expert > 1:
        if shard * context % expert:
            raise UserError(f"expert = {expert} does not divide shard x context = {shard * context}")
        expert_grid = grid.view(pipeline, replicate, -1, expert, tensor)
        new = [group_along(expert_grid, dimension, name) for dimension, name in ((2, "expert_shard"), (3, "expert"))]
        experts: Any = DeviceMesh.from_group(
            [*groups[:2], *new, groups[3]],
            device_type,
            expert_grid,
            mesh_dim_names=("pipeline", "replicate", "expert_shard", "expert", "tensor"),
        )
        expert_meshes = {
            "expert": experts["expert", "tensor"] if tensor > 1 else experts["expert"],
            "expert_fsdp": experts["replicate", "expert_shard"] if replicate > 1 else experts["expert_shard"],
        }
    return Mesh(
        sizes=sizes,
        fsdp=mesh["replicate", "shard"] if replicate > 1 else mesh["shard"],
        tensor=mesh["tensor"],
        context=DeviceMesh.from_group(context_group, device_type, mesh_dim_names=("context",)),
        pipeline=mesh["pipeline"],
        data_rank=mesh["replicate"].get_local_rank() * shard + mesh["shard"].get_local_rank() // context,
        num_data_ranks=replicate * shard,
        **expert_meshes,
    )


def group_along(grid: Tensor, dimension: int, name: str) -> dist.ProcessGroup:
    """Returns this rank's process group along a dimension of the grid."""
    return process_group.subgroup(grid.movedim(dimension, -1).reshape(-1, grid.size(dimension)).tolist(), name)
