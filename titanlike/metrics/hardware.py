"""Hardware limits and memory use of a device."""

import resource
import sys

import torch

# Dense bfloat16 FLOP/s from the vendors' data sheets. The first match counts.
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "A10G": 70e12,
}  # fmt: skip


def peak_flops(device_name: str) -> float | None:
    """Returns the peak bfloat16 FLOP/s of a device, or None if it is unknown, as for an instance of a GPU (MIG).

    The name of an instance, such as "NVIDIA H200 MIG 1g.18gb", does not say which share of the multiprocessors it has.
    """
    parts = device_name.replace("-", " ").split()
    if "MIG" in parts:
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if all(part in parts for part in name.split())), None)


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU as CUDA reports it, or "cpu" or "mps"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory of this process: allocated on the GPU or, on a CPU or Apple GPU, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
