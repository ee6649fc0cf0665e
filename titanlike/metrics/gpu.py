"""What NVML, the library of the NVIDIA driver, reports of a GPU. It requires the package `nvidia-ml-py`. Does not import torch."""

import math
from collections.abc import Callable
from typing import Any

# Reasons for lower clocks that are faults. Others are normal: an idle GPU, its power cap, clocks that an administrator has set.
THROTTLE_REASONS = {
    0x40: "hardware thermal slowdown",
    0x20: "software thermal slowdown",
    0x80: "power brake",
    0x08: "hardware slowdown",
}
HARDWARE_SLOWDOWN, CAUSES_OF_HARDWARE_SLOWDOWN = 0x08, 0x40 | 0x80
NVLINK_SENT, NVLINK_RECEIVED = 138, 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, which count KiB
ALL_LINKS = 2**32 - 1


def nvml_problem() -> str:
    """Returns why NVML cannot be used, or "" if it can."""
    try:
        import pynvml
    except ImportError:
        return "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    return ""


def throttle_reasons(bits: int) -> list[str]:
    """Returns the names of the faults in NVML's bits. A hardware slowdown whose cause is another bit is not named."""
    if bits & CAUSES_OF_HARDWARE_SLOWDOWN:
        bits &= ~HARDWARE_SLOWDOWN
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


class GPU:
    """A GPU by the address of its PCI bus, which does not depend on CUDA_VISIBLE_DEVICES. Raises `OSError` if NVML cannot be used
    or does not know the GPU."""

    def __init__(self, pci_bus_id: str) -> None:
        if problem := nvml_problem():
            raise OSError(problem)
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise OSError(f"NVML: {error}") from error
        self.index = int(self._value(lambda: pynvml.nvmlDeviceGetIndex(self._handle), -1))  # that of nvidia-smi

    def read(self) -> dict[str, float]:
        """Returns the current values. Those that the GPU does not have are NaN."""
        nvml, handle = self._nvml, self._handle
        sent, received = self._nvlink_bytes()
        return {
            "gpu/utilization": self._value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            "gpu/memory_gib": self._value(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30),
            "gpu/power_watts": self._value(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "gpu/temperature_celsius": self._value(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu/throttle_bits": self._value(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "gpu/nvlink_sent_bytes_per_second": sent,
            "gpu/nvlink_received_bytes_per_second": received,
        }

    def close(self) -> None:
        """Releases NVML."""
        self._nvml.nvmlShutdown()

    def _nvlink_bytes(self) -> list[float]:
        fields = [(NVLINK_SENT, ALL_LINKS), (NVLINK_RECEIVED, ALL_LINKS)]
        try:
            found = self._nvml.nvmlDeviceGetFieldValues(self._handle, fields)
        except self._nvml.NVMLError:
            return [math.nan, math.nan]
        return [math.nan if one.nvmlReturn else one.value.ullVal * 1024.0 for one in found]

    def _value(self, read: Callable[[], float], missing: float = math.nan) -> float:
        try:
            return float(read())
        except self._nvml.NVMLError:  # not supported by this GPU or driver
            return missing
