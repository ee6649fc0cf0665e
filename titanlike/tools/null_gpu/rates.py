"""Predicts the time of a kernel from what it computes and moves. Fitted to the ten rows that one H200 measured (docs/results.md).

Matmuls and attention take what they take alone on the device: the planner's formula, corrected by what the H200 measured for the
nearest shape. Other kernels take the longer of moving their bytes and issuing their instructions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from titanlike.config import UserError
from titanlike.tools.null_gpu import library
from titanlike.tools.null_gpu.kernels import Kernel
from titanlike.tools.planning.collectives import Collective, Links
from titanlike.tools.planning.hardware import Hardware, load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.kernels import Kernels
from titanlike.tools.planning.operators import Counts
from titanlike.tools.planning.workload import Matmul
from titanlike.tools.trace import AXES

MEMORY_FRACTION = 2.95 / 4.8  # of the data sheet's bandwidth
ISSUE_FACTOR = 1.6
CLOCK_FRACTION = 1.6 / 1.98  # of the highest clock, under load
SCHEDULERS = 4  # of a multiprocessor, each of which issues an instruction of a warp per clock

# TFLOP/s of an H200, mean of the forward and both backward products (benchmarks/results/gpu). Measured with 32,768 and 16,384 rows,
# above which the rate changes no more; those of the head are those of the loss's chunks.
MEASURED_MATMULS: dict[str, dict[tuple[int, int, int], float]] = {
    "bfloat16": {
        (16384, 2048, 2048): 724.8, (16384, 2048, 512): 535.5, (16384, 2048, 8192): 726.7, (4096, 2048, 128256): 695.0,
        (16384, 4096, 4096): 708.4, (16384, 4096, 1024): 641.7, (16384, 4096, 14336): 710.2, (4096, 4096, 128256): 671.2,
    },
    "float8": {(16384, 4096, 4096): 1363.5, (16384, 4096, 1024): 1049.4, (16384, 4096, 14336): 1409.8},
}  # fmt: skip
# The same of causal attention over 8,192 tokens, by kernel and size of a head.
MEASURED_ATTENTION = {"fused": {64: 430.1, 128: 550.0}, "flash": {64: 262.2, 128: 293.0}}
MEASURED_LENGTH = 8192
BACKWARD_FLOPS = 2.5  # of attention, relative to the forward pass


def device_of(hardware: Hardware) -> str:
    """Returns the null device that stands for a GPU: the one with its CUDA name. Raises `UserError` if there is none."""
    devices = library.devices()
    found = next((name for name, device in devices.items() if device["name"] in hardware.devices), "")
    if not found:
        raise UserError(f"{hardware.name} cannot be emulated; choose from {', '.join(sorted(devices))}")
    return found


@dataclass(frozen=True)
class Rates:
    """The times of kernels of a job on a GPU."""

    job: Job
    hardware: Hardware
    device: str  # null device

    @cached_property
    def bytes_per_second(self) -> float:
        """Of kernels that are bound by memory."""
        return self.hardware.memory_gb_per_second * 1e9 * MEMORY_FRACTION

    @cached_property
    def instructions_per_second(self) -> float:
        """Of all warps together."""
        device = library.devices()[self.device]
        clock = device["clock_khz"] * 1e3 * CLOCK_FRACTION
        return device["multiprocessors"] * SCHEDULERS * clock / ISSUE_FACTOR

    def _alone(self, hardware: Hardware) -> Kernels:
        return Kernels(Counts(self.job), replace(hardware, efficiency=1.0, float8_efficiency=1.0))

    @cached_property
    def _own(self) -> Kernels:
        """The planner's formulas for matmuls and attention, without what slows them in a step."""
        return self._alone(self.hardware)

    @cached_property
    def _h200(self) -> Kernels:
        return self._alone(load_hardware("h200"))

    def seconds(self, kernel: Kernel) -> float:
        """Returns the time of a call."""
        if kernel.kind == "collective":
            return self._collective(kernel)
        if kernel.is_matmul:
            return self._matmul(product_of(kernel))
        if kernel.is_attention:
            return self._attention(kernel)
        return max(kernel.bytes / self.bytes_per_second, kernel.issued / self.instructions_per_second)

    def _matmul(self, matmul: Matmul) -> float:
        kind = "float8" if matmul.float8 else self.job.recipe.training.compute_dtype
        correction = 1.0
        if not matmul.flops:
            return 0.0
        if (measured := MEASURED_MATMULS.get(kind)) and not matmul.grouped:
            m, n, k = nearest = min(measured, key=lambda shape: _distance(shape, (matmul.m, matmul.n, matmul.k)))
            formula = sum(self._h200.matmul(Matmul(*each, matmul.float8)) for each in ((m, n, k), (m, k, n), (n, k, m)))
            correction = 6.0 * m * n * k / (measured[nearest] * 1e12) / formula
        return correction * self._own.matmul(matmul)

    def _attention(self, kernel: Kernel) -> float:
        backward = "backward" in kernel.name
        queries, keys = (shape for shape, _ in kernel.tensors[backward : backward + 2])
        measured = MEASURED_ATTENTION["fused" if "cudnn" in kernel.name else "flash"]
        nearest = min(measured, key=lambda size: abs(size - queries[-1]))
        scale = self._own.attention_speeds[backward] / self._h200.attention_speeds[backward]
        half = self.hardware.attention_half_length
        length = max(keys[-3:-1])
        scale *= length / (length + half) * (MEASURED_LENGTH + half) / MEASURED_LENGTH
        flops = 2.0 * math.prod(queries) * length * (BACKWARD_FLOPS if backward else 1.0)
        return flops / (measured[nearest] * 1e12 * scale)

    def axis(self, kernel: Kernel) -> str:
        """Returns the mesh dimension of a collective."""
        name = kernel.group[0].removeprefix("mesh_")
        sizes = self.job.layout.dimensions()
        return name if name in AXES else next((axis for axis, size in sizes.items() if size > 1), "shard")

    def _collective(self, kernel: Kernel) -> float:
        axis = self.axis(kernel)
        purpose = "keys and values" if axis == "context" else "activations"
        return Links(self.job, self.hardware).seconds(Collective(kernel.collective, axis, purpose, 1, kernel.bytes))


def product_of(kernel: Kernel) -> Matmul:
    """Returns the matmul of a kernel, from its arguments."""
    (a, dtype), (b, _) = kernel.tensors[1:3] if "add" in kernel.name else kernel.tensors[:2]
    float8, k = "float8" in dtype, a[-1]
    if len(b) == 3:
        rows = a[1] if len(a) == 3 else a[0] / b[0]
        return Matmul(rows, math.prod(b[1:]) / k, k, float8, count=b[0], grouped="" if len(a) == 3 else "m")
    return Matmul(math.prod(a[:-1]), b[-1], k, float8)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns how much the dimensions of two matmuls differ, in any order."""
    return sum(abs(math.log(a / b)) for a, b in zip(sorted(one), sorted(other), strict=True))
