"""SageMaker instance types that can train: GPUs, memory, network and price."""

from dataclasses import dataclass

from titanlike.config import UserError
from titanlike.config.base import nearest

PRICE_SOURCE = "us-east-1, on-demand, 2026-09, unofficial"
"""Region and date of the prices below. `--price` overrides them."""


@dataclass(frozen=True)
class InstanceType:
    """One instance type."""

    name: str
    num_gpus: int
    gpu: str
    gpu_gib: int  # memory of one GPU
    efa: bool  # has the network interface that NCCL uses between instances
    price: float | None = None  # dollars an hour; None if unknown


INSTANCE_TYPES = {
    instance_type.name: instance_type
    for instance_type in (
        InstanceType("ml.p5.48xlarge", 8, "H100", 80, True, 63.30),
        InstanceType("ml.p5.4xlarge", 1, "H100", 80, True, 7.91),
        InstanceType("ml.p5e.48xlarge", 8, "H200", 141, True),
        InstanceType("ml.p5en.48xlarge", 8, "H200", 141, True),
        InstanceType("ml.p6-b200.48xlarge", 8, "B200", 180, True),
        InstanceType("ml.p4d.24xlarge", 8, "A100", 40, True, 25.25),
        InstanceType("ml.p4de.24xlarge", 8, "A100", 80, True, 31.56),
        InstanceType("ml.g6e.48xlarge", 8, "L40S", 48, True, 37.66),
        InstanceType("ml.g6.48xlarge", 8, "L4", 24, True),
        InstanceType("ml.g5.48xlarge", 8, "A10G", 24, True),
        InstanceType("ml.g5.2xlarge", 1, "A10G", 24, False),
        InstanceType("ml.g6e.2xlarge", 1, "L40S", 48, False),
    )
}


def find_instance_type(name: str) -> InstanceType:
    """Returns the instance type of this name; the `ml.` prefix is optional."""
    full_name = name if name.startswith("ml.") else f"ml.{name}"
    if full_name not in INSTANCE_TYPES:
        match = nearest(full_name, list(INSTANCE_TYPES))
        hint = f"did you mean {match}?" if match else f"supported: {', '.join(INSTANCE_TYPES)}"
        raise UserError(f"--instance-type {name}: unsupported instance type; {hint}")
    return INSTANCE_TYPES[full_name]
