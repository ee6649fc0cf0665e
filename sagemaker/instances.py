"""SageMaker's instance types: the hardware files of the planner that are named after one."""

from dataclasses import dataclass

from titanlike.config import UserError
from titanlike.config.base import nearest
from titanlike.tools.planning.hardware import Hardware, hardware_names, load_hardware


@dataclass(frozen=True)
class InstanceType:
    """One instance type."""

    name: str
    hardware: Hardware

    @property
    def num_gpus(self) -> int:
        return self.hardware.gpus_per_node

    @property
    def price(self) -> float | None:
        """Dollars an hour; None if unknown."""
        return self.hardware.dollars_per_gpu_hour * self.num_gpus or None


def instance_types() -> list[str]:
    """Returns the names of all instance types."""
    return [name for name in hardware_names() if name.startswith("ml.")]


def find_instance_type(name: str) -> InstanceType:
    """Returns the instance type of this name; the `ml.` prefix is optional."""
    full_name, known = name if name.startswith("ml.") else f"ml.{name}", instance_types()
    if full_name not in known:
        match = nearest(full_name, known)
        hint = f"did you mean {match}?" if match else f"supported: {', '.join(known)}"
        raise UserError(f"--instance-type {name}: unsupported instance type; {hint}")
    return InstanceType(full_name, load_hardware(full_name))
