"""Lets torchtitan train on a CPU. To be imported before it."""

import sys
from types import ModuleType
from typing import Any

import torch

# It detects the accelerator at import, and assumes CUDA if there is none.
torch._utils._get_available_device_type = lambda: "cpu"
# 0.2.2 always imports its mixture-of-experts kernels and with them triton, which CPU builds of torch lack.
kernels = ModuleType("torchtitan.models.moe.kernels")
kernels.generate_permute_indices = None  # type: ignore[attr-defined]
sys.modules[kernels.__name__] = kernels
# Its barrier after the first step passes device ids, which gloo does not support.
torch.distributed.barrier = lambda **_: None


class NoMonitor:
    """torch.cpu has no memory statistics."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        """Returns zeros."""
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Does nothing."""
