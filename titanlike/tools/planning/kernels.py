"""Time of the kernels of a rank. Does not import torch."""

from dataclasses import dataclass
from functools import cached_property

from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.operators import Counts
from titanlike.tools.planning.workload import Matmul, Workload

# Speed of float8 matmuls with finer scales than one per tensor, relative to those.
SCALING_SPEED = {"rowwise": 0.75, "rowwise_with_gw_hp": 0.75, "mxfp8": 0.9}

# Speed of attention relative to FlashAttention: of the memory-efficient kernel, and of FlexAttention, which documents and
# soft-capped scores use. That with a sliding window is not measured; it is taken as that without.
EFFICIENT_SPEED, FLEX_SPEED = 0.6, 0.85


@dataclass(frozen=True)
class Kernels:
    """The speed of a GPU at the operators of a job."""

    counts: Counts
    hardware: Hardware

    @cached_property
    def speed(self) -> float:
        """Fitted efficiency of the hardware in the job's precision."""
        return self.hardware.float8_efficiency if self.counts.float8_names else self.hardware.efficiency

    @cached_property
    def memory_speed(self) -> float:
        """Bytes per second of elementwise kernels."""
        return self.hardware.memory_gb_per_second * self.hardware.memory_fraction * 1e9 * self.speed

    def matmul(self, matmul: Matmul) -> float:
        """Returns the seconds of a matmul: slower where a dimension is small, and never faster than memory."""
        hardware, recipe = self.hardware, self.counts.job.recipe
        peak, cost = hardware.bf16_tflops * hardware.gemm_fraction, 1.0
        if recipe.training.compute_dtype == "float32" or recipe.float8.emulate:
            reduced = recipe.training.matmul_precision != "highest" and hardware.tf32_tflops
            peak = (hardware.tf32_tflops if reduced else hardware.float32_tflops) * hardware.gemm_fraction
        elif matmul.float8:
            peak = (hardware.float8_tflops or hardware.bf16_tflops) * hardware.float8_gemm_fraction
            peak *= SCALING_SPEED.get(recipe.float8.scaling, 1.0)
            cost = max(1.0, peak / (hardware.bf16_tflops * hardware.gemm_fraction))
        for name, size in (("m", matmul.m), ("n", matmul.n), ("k", matmul.k)):
            half = hardware.grouped_half_rows if name == matmul.grouped else hardware.gemm_half_size
            peak *= size / (size + half * cost)
        inputs = (matmul.m + matmul.n) * matmul.k * (1 if matmul.float8 else self.counts.element)
        moved = (inputs + matmul.m * matmul.n * self.counts.element) * matmul.count
        return max(matmul.flops / (peak * 1e12 * self.speed), moved / self.memory_speed)

    @cached_property
    def attention_speeds(self) -> tuple[float, float]:
        """FLOPs per second of attention, forward and backward."""
        hardware, job, recipe = self.hardware, self.counts.job, self.counts.job.recipe
        training = recipe.training
        kernel = "flash" if training.attention in ("flash", "efficient", "math") or job.layout.context > 1 else "fused"
        factor = EFFICIENT_SPEED if training.attention in ("efficient", "math") else 1.0
        if recipe.data.masks_documents or recipe.model.attention_soft_cap or recipe.model.has_sinks:
            kernel, factor = "flash", factor * FLEX_SPEED
        kernel = self.counts.job.program.attention or kernel
        fractions = (
            (hardware.attention_forward, hardware.attention_backward)
            if kernel == "fused"
            else (hardware.flash_forward, hardware.flash_backward)
        )
        peak = hardware.float32_tflops if training.compute_dtype == "float32" else hardware.bf16_tflops
        factor *= training.seq_len / (training.seq_len + hardware.attention_half_length)
        # Small heads have as many exponentials, which are slow, for fewer matmul FLOPs.
        head_dim = min(recipe.model.head_dim, 128)
        factor *= head_dim / (head_dim + 64) * 192 / 128
        forward, backward = (peak * 1e12 * fraction * factor * self.speed for fraction in fractions)
        return forward, backward

    def seconds(self, work: Workload) -> dict[str, float]:
        """Returns the seconds of some work, by kind of operator."""
        forward, backward = self.attention_speeds
        parts = {
            "matmul": sum(self.matmul(matmul) for matmul in work.matmuls),
            "attention": work.attention_forward / forward + work.attention_backward / backward,
            "elementwise": work.bytes / self.memory_speed,
        }
        launch_us = self.counts.job.program.launch_us or self.hardware.launch_us
        parts["kernel launches"] = max(0.0, work.kernels * launch_us * 1e-6 - sum(parts.values()))
        return parts
