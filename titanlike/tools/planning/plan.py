"""Memory, communication, time and cost of a recipe on a number of GPUs. Does not import torch."""

import sys
from dataclasses import dataclass, replace
from functools import cached_property

from titanlike.recipe import PretrainRecipe
from titanlike.tools.planning.collectives import Collective
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import Memory, memory, with_program_loss
from titanlike.tools.planning.ranges import Range, kind_of, range_of
from titanlike.tools.planning.step_time import Rank, StepTime, step_time
from titanlike.tools.planning.traffic import traffic

GIB = 2**30

OUTSIDE_ALLOCATOR = 3 * 2**29
"""Bytes of a GPU that the caching allocator cannot use: the CUDA context, kernels and the buffers of NCCL."""


UNEQUAL_STAGES = 0.05
"""Fraction by which the first pipeline rank may compute more than others, which then have a smaller bubble."""


@dataclass(frozen=True)
class Plan:
    """What a training run needs and how long it takes."""

    job: Job
    hardware: Hardware
    memory: tuple[Memory, ...]  # of each pipeline rank
    traffic: tuple[tuple[Collective, ...], ...]  # of each pipeline rank, in a step
    time: StepTime
    measured: bool = False  # the hardware has the efficiency of a measured run of this recipe

    @cached_property
    def worst_rank(self) -> int:
        """The pipeline rank that needs most memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].reserved)

    @property
    def allocated(self) -> int:
        """Peak of allocated bytes on the GPU that needs most."""
        return self.memory[self.worst_rank].allocated

    @property
    def reserved(self) -> int:
        """Peak of bytes that the caching allocator reserves on the GPU that needs most."""
        return self.memory[self.worst_rank].reserved

    @property
    def available(self) -> int:
        """Bytes of a GPU that the caching allocator can reserve."""
        return available_memory(self.hardware)

    @property
    def fits(self) -> bool:
        """Whether every GPU has enough memory, fragmentation included."""
        return self.reserved <= self.available

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all GPUs."""
        return self.job.recipe.training.tokens_per_step / self.time.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of a GPU."""
        return self.tokens_per_second / self.job.num_gpus

    @cached_property
    def kind(self) -> str:
        """The class of published runs that the plan is compared with."""
        return kind_of(self.job, self.hardware)

    @cached_property
    def range(self) -> Range:
        """Measured over predicted speed of those runs or, with a measured run, of their ratios."""
        return range_of(self.job, self.hardware, self.measured)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass, without recomputation, as a run counts them for MFU."""
        return self.job.recipe.flops_per_token

    @property
    def flops_per_step(self) -> int:
        """FLOPs of a step, over all GPUs."""
        return self.flops_per_token * self.job.recipe.training.tokens_per_step

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, of the bfloat16 peak, also with float8."""
        return self.tokens_per_second_per_gpu * self.flops_per_token / (self.hardware.bf16_tflops * 1e12)

    @property
    def hours(self) -> float:
        """Hours of all steps, without startup, validation and checkpointing."""
        training = self.job.recipe.training
        seconds = 0.0
        for num_steps, size in training.batch_sizes.until(training.steps):
            seconds += num_steps * (
                self.time.seconds if size == training.global_batch_size else self._step_seconds(size)
            )
        return seconds / 3600

    def _step_seconds(self, global_batch_size: int) -> float:
        """Returns the time of a step of the batch-size ramp."""
        recipe = self.job.recipe
        recipe = replace(recipe, training=replace(recipe.training, global_batch_size=global_batch_size, batch_ramp=()))
        job = replace(self.job, recipe=recipe)
        traffics = [list(traffic(job, rank)) for rank in range(job.layout.pipeline)]
        return step_time(job, self.hardware, traffics).seconds

    @property
    def gpu_hours(self) -> float:
        """Hours of the run times GPUs."""
        return self.hours * self.job.num_gpus

    @property
    def dollars(self) -> float | None:
        """Price of the run, or None if the hardware has no price."""
        price = self.hardware.dollars_per_gpu_hour
        return price * self.gpu_hours if price else None

    @property
    def kwh(self) -> float | None:
        """Energy of the run, or None if the power of the hardware is unknown."""
        watts = self.hardware.gpu_watts
        return watts * self.gpu_hours / 1000 if watts else None


def available_memory(hardware: Hardware) -> int:
    """Returns the bytes of a GPU that the caching allocator can reserve."""
    return round(hardware.memory_gib * GIB) - OUTSIDE_ALLOCATOR


def make_plan(job: Job, hardware: Hardware, *, measured: bool = False) -> Plan:
    """Plans a job.

    Args:
        job: The recipe and the number of GPUs. Raises `UserError` where the layout or the batch does not divide.
        hardware: What it runs on.
        measured: The hardware comes from `ranges.anchored`.
    """
    ranks = range(job.layout.pipeline)
    memories = tuple(with_program_loss(job, memory(job, rank)) for rank in ranks)
    traffics = tuple(tuple(traffic(job, rank)) for rank in ranks)
    return Plan(job, hardware, memories, traffics, step_time(job, hardware, traffics), measured)


def deciding_ranks(plan: Plan) -> list[int]:
    """Returns the pipeline ranks that decide whether a job fits: the one that needs most memory, and the last one."""
    return sorted({plan.worst_rank, len(plan.memory) - 1})


def least_seconds(job: Job, hardware: Hardware) -> float:
    """Returns a lower bound of the time of a step: what the first pipeline rank computes, and the bubble between equal stages.

    Much faster with a pipeline than `step_time`, which simulates its schedule.
    """
    rank = Rank(job, hardware, traffic(job, 0), 0)
    busy = sum(rank.computation.values())
    seconds = busy + sum(rank.overlap[0].values()) + sum(rank.once.values())
    if job.layout.pipeline == 1:
        return seconds
    if not job.schedule.splits_backward:
        stages_per_rank = len(job.split) // job.layout.pipeline
        seconds += busy * (job.layout.pipeline - 1) / (job.num_microbatches * stages_per_rank)
    return seconds * (1 - UNEQUAL_STAGES)


def plan_or_none(recipe: PretrainRecipe, num_gpus: int, hardware: Hardware) -> Plan | None:
    """Returns a plan. If the planner fails, prints a warning and returns None: what it is shown beside must not fail with it."""
    try:
        return make_plan(Job(recipe, num_gpus), hardware)
    except Exception as error:  # noqa: BLE001  a recipe that is valid must not be refused because of its plan
        print(f"warning: no plan: {type(error).__name__}: {error}", file=sys.stderr)
        return None
