"""Sums over process groups."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype to accumulate sums over many batches in: float64, except on Apple GPUs, which do not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def all_reduce_sum(tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Sums over each group in turn, in place. Does not synchronize a GPU with the host."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


def sum_over_mesh(values: Tensor, parameter: Tensor) -> Tensor:
    """Sums over all ranks with a part or a copy of a parameter, by one all-reduce for each dimension of its mesh. Tensor-parallel
    ranks count the same tokens, which multiplies the sums."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    return all_reduce_sum(values, [] if mesh is None else [mesh.get_group(number) for number in range(mesh.ndim)])
