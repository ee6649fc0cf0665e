"""Recognizing a DTensor without importing `torch.distributed.tensor`, which takes most of a second and which a single process
does not need. Where it has not been imported, no tensor can be one."""

import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeIs[DTensor]":
    """`isinstance(value, DTensor)`."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as plain memory."""
    mine = tensor.to_local() if is_dtensor(tensor) else tensor
    return getattr(mine, "stored", mine)  # of a shard that FSDP gathers in float8


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that have other parts of the tensor."""
    if not is_dtensor(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
