"""How sure a plan's speed is: its range, from the errors of plans of published runs, and a measured speed as an anchor.

`benchmarks/planner_validation.py` computes the ranges: each source of measurements is predicted with figures that are fitted to the
others. Does not import torch.
"""

from dataclasses import dataclass, replace

from titanlike.config import UserError
from titanlike.models.moe.config import MoeConfig
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.step_time import step_time
from titanlike.tools.planning.traffic import traffic

NEWER_TFLOPS = 1000.0
"""Dense bfloat16 peak above which a GPU is newer than Hopper: few runs have been published, and their power limits differ."""

MIXTURES = "mixtures of experts"
OTHERS = "dense models with tensor, context or pipeline parallelism"  # for classes with few runs
HOPPER, NEWER = "Hopper and Ampere", "newer GPUs"


@dataclass(frozen=True)
class Range:
    """Measured over predicted speed of published runs, of which 90% are between `low` and `high`, rounded up to whole runs."""

    low: float
    high: float
    runs: int

    @property
    def covered(self) -> str:
        """How many of the runs are in the range: all of less than ten."""
        return f"90% of {self.runs}" if self.runs >= 10 else f"all {self.runs}"


FEWEST = 6
"""Runs of a class of dense models that has a range of its own."""

RANGES = {
    f"FSDP, {HOPPER}": Range(0.92, 1.2, 41),
    f"FSDP, {NEWER}": Range(0.68, 1.13, 6),
    MIXTURES: Range(0.59, 1.14, 5),
    OTHERS: Range(0.81, 1.14, 47),
    f"pipeline, {HOPPER}": Range(0.87, 1.18, 14),
    f"tensor, {HOPPER}": Range(0.82, 1.12, 25),
}
"""By `range_name`. `tests/planning/test_planning_cost.py` compares them with the recorded ones."""

ANCHORED = Range(0.83, 1.2, 132)
"""Of speed relative to another layout or size in the same table of measurements."""


@dataclass(frozen=True)
class Errors:
    """Median errors of plans of published runs."""

    held_out: float  # with figures that are fitted to other sources
    runs: int
    first: float  # when they were first compared, before anything was fitted to them
    first_runs: int


DENSE_ERRORS = Errors(0.0704, 94, 0.305, 38)
MIXTURE_ERRORS = Errors(0.2113, 5, 1.27, 5)


def kind_of(job: Job, hardware: Hardware) -> str:
    """Returns the class of runs that a job is compared with."""
    layout = job.layout
    if isinstance(job.recipe.model, MoeConfig):
        return MIXTURES
    parallel = [name for name in ("pipeline", "context", "tensor") if layout.dimensions()[name] > 1]
    return f"{parallel[0] if parallel else 'FSDP'}, {NEWER if hardware.bf16_tflops > NEWER_TFLOPS else HOPPER}"


def range_name(kind: str) -> str:
    """Returns the name of the published runs that the range of a class comes from: the class or, if it has few runs, `OTHERS`."""
    return kind if kind in RANGES else OTHERS


def range_of(job: Job, hardware: Hardware, measured: bool) -> Range:
    """Returns the range of a job's speed.

    Args:
        measured: The hardware comes from `anchored`.
    """
    return ANCHORED if measured else RANGES[range_name(kind_of(job, hardware))]


def anchored(job: Job, hardware: Hardware, tokens_per_second_per_gpu: float) -> Hardware:
    """Returns the hardware with the efficiency at which a job has this speed. Raises `UserError` if there is none."""
    collectives = [traffic(job, rank) for rank in range(job.layout.pipeline)]
    low, high = 0.02, 2.0  # factors of the efficiency
    tokens = job.recipe.training.tokens_per_step / job.num_gpus

    def changed(factor: float) -> Hardware:
        values = {name: getattr(hardware, name) * factor for name in ("efficiency", "float8_efficiency")}
        return replace(hardware, **values)

    def speed(factor: float) -> float:
        return tokens / step_time(job, changed(factor), collectives).seconds

    slowest, fastest = speed(low), speed(high)
    if not slowest <= tokens_per_second_per_gpu <= fastest:
        raise UserError(
            f"--measured {tokens_per_second_per_gpu:g}: this recipe cannot have that speed on {job.num_gpus:,} x {hardware.name}; "
            f"give the tokens per second of one GPU, between {slowest:,.0f} and {fastest:,.0f}"
        )
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if speed(middle) < tokens_per_second_per_gpu else (low, middle)
    return changed((low * high) ** 0.5)
