"""Whole matrices for an optimizer, of which ranks hold shards: each is assembled on one rank, which computes for all."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlike.config.layout import shard_range
from titanlike.distributed import process_group
from titanlike.utils.dtensor import local_tensor

Slices = tuple[slice, slice]


@dataclass(frozen=True)
class Round:
    """Matrices that are computed at the same time, at most one on each rank."""

    indices: list[int]  # of the parameters
    owned: int | None  # which of them this rank computes
    shape: torch.Size  # of that matrix
    parts: list[Slices]  # of it, which each rank of the group holds


def sizes_of(mesh: DeviceMesh | None) -> dict[str, int]:
    """Returns the sizes of the dimensions of a mesh, of which None has none."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) if mesh else {}


def group_of_shards(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Returns the group over which parameters with this mesh are sharded, if any. All ranks call this together, also on a
    pipeline stage without a matrix: all ranks take part when NCCL creates a group."""
    sizes = {name: size for name, size in sizes_of(mesh).items() if name in ("shard", "tensor") and size > 1}
    if mesh is None or len(sizes) < 2:
        return mesh.get_group(*sizes) if mesh and sizes else None
    # The innermost dimensions of the mesh: consecutive ranks.
    return process_group.subgroup(torch.arange(dist.get_world_size()).view(-1, prod(sizes.values())).tolist())


class WholeMatrices:
    """Applies a function to matrices whose shards are on several ranks, each on one rank.

    In a round, each rank sends its shards of several matrices to the ranks that own these, and gets the shards of the results back:
    two all-to-alls. Replicas of HSDP own different matrices, and all-gather the results.

    Args:
        parameters: Matrices with the same mesh, for which all ranks have called `group_of_shards`.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        mesh: Any = getattr(parameters[0], "device_mesh", None) if parameters else None
        sizes = {"replicate": 1, "shard": 1, "tensor": 1} | sizes_of(mesh)
        coordinate = dict.fromkeys(sizes, 0) | {name: mesh.get_local_rank(name) for name in sizes_of(mesh)}
        self.replicas = mesh.get_group("replicate") if sizes["replicate"] > 1 else None
        self.group = group_of_shards(mesh)
        self.num_replicas, self.size = sizes["replicate"], sizes["shard"] * sizes["tensor"]
        self.replica = coordinate["replicate"]
        self.rank = coordinate["shard"] * sizes["tensor"] + coordinate["tensor"]
        self._shard, self._tensor = sizes["shard"], sizes["tensor"]
        self.rounds = list(self._rounds(parameters))

    def _rounds(self, parameters: Sequence[Tensor]) -> Iterator[Round]:
        # The matrices of a round take equally long if they have the same shape.
        order = sorted(
            range(len(parameters)), key=lambda index: (-parameters[index].numel(), parameters[index].shape, index)
        )
        number, rank = self.num_replicas * self.size, self.replica * self.size + self.rank
        for start in range(0, len(order), number):
            indices = order[start : start + number]
            owned = rank if rank < len(indices) else None
            matrix = parameters[indices[rank if owned is not None else 0]]
            yield Round(indices, owned, matrix.shape, [self._slices(matrix, each) for each in range(self.size)])

    def _slices(self, parameter: Tensor, rank: int) -> Slices:
        """Returns the part of a matrix that a rank of the group holds."""
        if not isinstance(parameter, DTensor):
            return slice(0, parameter.shape[0]), slice(0, parameter.shape[1])
        names = parameter.device_mesh.mesh_dim_names or ()
        dimension = None  # replicated: all tensor-parallel ranks send and get the same
        if self._tensor > 1:
            dimension = getattr(parameter.placements[names.index("tensor")], "dim", None)
        shard, tensor = divmod(rank, self._tensor)
        # Tensor parallelism shards first; FSDP shards the rows of that.
        ranges = [range(size) for size in parameter.shape]
        if dimension is not None:
            ranges[dimension] = shard_range(ranges[dimension], self._tensor, tensor)
        ranges[0] = shard_range(ranges[0], self._shard, shard)
        if rank == self.rank:
            assert local_tensor(parameter).shape == tuple(map(len, ranges)), (parameter.placements, ranges)
        rows, columns = ranges
        return slice(rows.start, rows.stop), slice(columns.start, columns.stop)

    def apply(self, step: Round, shards: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Returns this rank's shards of `function` of each matrix of the round, which has the same shape as the matrix."""
        if self.num_replicas * self.size == 1:
            return [function(shard) for shard in shards]
        own = shards[self.replica * self.size :][: self.size]  # of the matrices of this replica
        sent = _flat(own, like=shards[0])
        sizes = [shard.numel() for shard in own] + [0] * (self.size - len(own))
        received_sizes = [0 if step.owned is None else _numel(part) for part in step.parts]
        received = self._all_to_all(sent, sizes, received_sizes)
        result = received
        if step.owned is not None:
            matrix = received.new_empty(step.shape)
            for part, values in zip(step.parts, received.split(received_sizes), strict=True):
                matrix[part] = values.view(matrix[part].shape)
            matrix = function(matrix)
            result = _flat([matrix[part] for part in step.parts], like=received)
        result = self._all_to_all(result, received_sizes, sizes)
        return [values.view(shards[index].shape) for index, values in enumerate(self._gather_replicas(result, shards))]

    def _gather_replicas(self, results: Tensor, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gathers the results of all replicas, one tensor for each matrix."""
        sizes = [shard.numel() for shard in shards]
        if self.replicas is None:
            return list(results.split(sizes))
        replica_sizes = [sizes[i * self.size :][: self.size] for i in range(self.num_replicas)]
        length = max(map(sum, replica_sizes))  # all ranks of an all-gather send equally much
        padded = results.new_zeros(length)
        padded[: results.numel()] = results
        gathered = results.new_empty(self.num_replicas * length)
        dist.all_gather_into_tensor(gathered, padded, group=self.replicas)
        return [
            part
            for values, part_sizes in zip(gathered.split(length), replica_sizes, strict=True)
            for part in values[: sum(part_sizes)].split(part_sizes)
        ]

    def _all_to_all(self, sent: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
        if self.group is None:
            return sent
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sizes, group=self.group)
        return received


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _numel(part: Slices) -> int:
    return prod(each.stop - each.start for each in part)
