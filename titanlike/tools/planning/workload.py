"""What a rank computes: matmuls, attention, and bytes of elementwise kernels. Does not import torch."""

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class Matmul:
    """A product of matrices (m, k) and (k, n)."""

    m: float
    n: float
    k: float
    float8: bool = False
    count: float = 1.0
    grouped: Literal["", "m", "k"] = ""  # dimension that differs between matmuls which are grouped in one kernel

    @property
    def flops(self) -> float:
        """Two for each multiplication and addition."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Workload:
    """What a rank computes in one pass through a module."""

    matmuls: tuple[Matmul, ...] = ()
    attention_forward: float = 0.0  # FLOPs
    attention_backward: float = 0.0
    bytes: float = 0.0  # read and written by elementwise kernels
    kernels: float = 0.0  # launched by the host

    def __add__(self, other: "Workload") -> "Workload":
        return Workload(
            self.matmuls + other.matmuls,
            self.attention_forward + other.attention_forward,
            self.attention_backward + other.attention_backward,
            self.bytes + other.bytes,
            self.kernels + other.kernels,
        )

    def times(self, factor: float) -> "Workload":
        """Returns the work of several passes, or of a part of one."""
        matmuls = tuple(replace(matmul, count=matmul.count * factor) for matmul in self.matmuls)
        forward, backward = self.attention_forward * factor, self.attention_backward * factor
        return Workload(matmuls, forward, backward, self.bytes * factor, self.kernels * factor)


@dataclass(frozen=True)
class Passes:
    """The work of a module in the forward and backward pass of a micro-batch."""

    forward: Workload = field(default_factory=Workload)
    recomputation: Workload = field(default_factory=Workload)
    backward_input: Workload = field(default_factory=Workload)
    backward_weight: Workload = field(default_factory=Workload)
