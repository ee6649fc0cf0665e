"""The local shard of a parameter, and the process groups over which it is sharded."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor as a plain tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "stored", local)  # a shard with float8 all-gather wraps its tensor


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the process groups over which a tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
