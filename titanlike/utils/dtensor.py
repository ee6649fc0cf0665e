"""DTensor helpers that do not import `torch.distributed.tensor`, which takes most of a second and which one process does not need.

If the module has not been imported, no tensor is a DTensor.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeIs[DTensor]":
    """Whether `value` is a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor as a plain tensor."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return getattr(local, "stored", local)  # a shard with float8 all-gather wraps its tensor


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the process groups over which a tensor is sharded."""
    if not is_dtensor(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
