"""What SageMaker rents out that this toolkit trains on: GPUs, their memory, the network between machines, and the price."""

from dataclasses import dataclass
from difflib import get_close_matches

from titanlike.config import UserError

PRICES = "us-east-1, on demand, 2026-09, second-hand"
"""Where and when the prices below held. They change: `--price` gives your own."""


@dataclass(frozen=True)
class Machine:
    """One kind of instance."""

    name: str
    num_gpus: int
    gpu: str
    gpu_gib: int  # memory of one
    efa: bool  # the network that NCCL needs between machines
    price: float | None = None  # dollars an hour; None: not known here


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("ml.p5.48xlarge", 8, "H100", 80, True, 63.30),
        Machine("ml.p5.4xlarge", 1, "H100", 80, True, 7.91),
        Machine("ml.p5e.48xlarge", 8, "H200", 141, True),
        Machine("ml.p5en.48xlarge", 8, "H200", 141, True),
        Machine("ml.p6-b200.48xlarge", 8, "B200", 180, True),
        Machine("ml.p4d.24xlarge", 8, "A100", 40, True, 25.25),
        Machine("ml.p4de.24xlarge", 8, "A100", 80, True, 31.56),
        Machine("ml.g6e.48xlarge", 8, "L40S", 48, True, 37.66),
        Machine("ml.g6.48xlarge", 8, "L4", 24, True),
        Machine("ml.g5.48xlarge", 8, "A10G", 24, True),
        Machine("ml.g5.2xlarge", 1, "A10G", 24, False),
        Machine("ml.g6e.2xlarge", 1, "L40S", 48, False),
    )
}


def machine_named(name: str) -> Machine:
    """The instance type of this name, with or without its `ml.`"""
    full = name if name.startswith("ml.") else f"ml.{name}"
    if full not in MACHINES:
        near = get_close_matches(full, MACHINES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(MACHINES)}"
        raise UserError(f"--instance-type {name}: not a machine that this toolkit knows; {hint}")
    return MACHINES[full]
