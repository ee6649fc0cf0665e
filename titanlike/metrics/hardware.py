"""What the hardware could do at most, so that a rate can be given as a share of it."""

import resource
import sys

import torch

# Dense bfloat16 operations a second, from the makers' data sheets, in the order in which names are tried.
PEAK_FLOPS = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
)


def peak_flops(device_name: str) -> float | None:
    """The peak of a device, or None where it is not known: no share is better than a wrong one."""
    words = device_name.replace("-", " ").split()
    for name, peak in PEAK_FLOPS:
        if all(word in words for word in name.split()):
            return peak
    return None


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has held so far: on the GPU, or of the process itself on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
