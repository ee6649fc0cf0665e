"""The ranks as a named grid: which of them share which part of the work."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlike.config.layout import DIMENSIONS


@dataclass(frozen=True)
class Mesh:
    """The grid of all ranks, and the lines and planes through this one.

    Weights and batches see it differently. Ranks that share a sequence (`context`) have the same weights, so these are
    sharded over them too: to FSDP, `shard` and `context` are one dimension.
    """

    sizes: dict[str, int]  # of all five dimensions
    weights: DeviceMesh  # what FSDP shards over, and replicates over where `replicate` is above 1
    tensor: DeviceMesh  # the ranks that share each matrix
    context: DeviceMesh  # the ranks that share each sequence
    pipeline: DeviceMesh  # the ranks that share the blocks
    data_rank: int  # which part of the data this rank reads ...
    data_ranks: int  # ... of how many

    @property
    def tokens(self) -> list[dist.ProcessGroup]:
        """Groups to sum over, one after the other, for a sum over all tokens of a batch."""
        return [self.weights.get_group(dimension) for dimension in range(self.weights.ndim)]

    @property
    def vocabulary(self) -> dist.ProcessGroup | None:
        """The ranks that each hold a slice of the logits; None where every rank has them whole."""
        return self.tensor.get_group() if self.sizes["tensor"] > 1 else None


def build_mesh(
    device_type: str, *, pipeline: int = 1, replicate: int = 1, shard: int = 1, context: int = 1, tensor: int = 1
) -> Mesh:
    """The grid of these sizes over all ranks, which are as many as their product."""
    weights = init_device_mesh(
        device_type,
        (pipeline, replicate, shard * context, tensor),
        mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
    )
    shared = init_device_mesh(
        device_type,
        (pipeline * replicate * shard, context, tensor),
        mesh_dim_names=("others", "context", "tensor"),
    )
    return Mesh(
        sizes=dict(zip(DIMENSIONS, (pipeline, replicate, shard, context, tensor), strict=True)),
        weights=weights["replicate", "shard"] if replicate > 1 else weights["shard"],
        tensor=weights["tensor"],
        context=shared["context"],
        pipeline=weights["pipeline"],
        data_rank=weights["replicate"].get_local_rank() * shard + weights["shard"].get_local_rank() // context,
        data_ranks=replicate * shard,
    )
