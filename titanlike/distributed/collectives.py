"""Sums over process groups."""

from collections.abc import Sequence

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
