"""Name and memory use of a device."""

import resource
import sys

import torch


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU as CUDA reports it, or "cpu" or "mps"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory of this process: allocated on the GPU or, on a CPU or Apple GPU, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
