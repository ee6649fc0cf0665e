"""Arithmetic on parallel dimensions, pipeline stages and batch sizes. Does not import torch.

The preflight checks, the pipeline and the run summary share these functions, so that they always agree.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from titanlike.config.base import LIMIT, UserError, divisors, one_of

# Dimensions of the device mesh, outermost first. The innermost ones communicate most, so their ranks share a node.
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
LAYOUT_KEYS = (
    *DIMENSIONS,
    "expert",
)  # the sizes of [parallelism]; experts are distributed over ranks of other dimensions

Ramp = tuple[tuple[int, int], ...]  # pairs of a number of steps and the sequences of each of them

# Block size of the quantized optimizer states. A shard boundary must not fall inside a block.
BLOCK = 64


@dataclass(frozen=True)
class PipelineSchedule:
    """Properties of a pipeline schedule."""

    torch_class: str
    stages_per_rank: int = 1  # the default
    fixed: bool = True  # the recipe cannot change stages_per_rank
    v_shaped: bool = False  # stages are assigned in ranks' order and back, so the first rank holds the first and last
    splits_backward: bool = False  # input and weight gradients are computed separately, to fill the pipeline bubble


SCHEDULES = {
    "gpipe": PipelineSchedule("ScheduleGPipe"),
    "1f1b": PipelineSchedule("Schedule1F1B"),
    "interleaved_1f1b": PipelineSchedule("ScheduleInterleaved1F1B", stages_per_rank=2, fixed=False),
    "zero_bubble": PipelineSchedule(
        "ScheduleInterleavedZeroBubble", stages_per_rank=2, fixed=False, splits_backward=True
    ),
    "zbv": PipelineSchedule("ScheduleZBVZeroBubble", stages_per_rank=2, v_shaped=True, splits_backward=True),
    "dualpipev": PipelineSchedule("ScheduleDualPipeV", stages_per_rank=2, v_shaped=True, splits_backward=True),
}


class SplittableConfig(Protocol):
    """What a split into pipeline stages depends on: the config of a model."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_mtp_layers(self) -> int: ...

    def lm_head_cost(self) -> float: ...


def shard_range(indices: range, num_shards: int, rank: int) -> range:
    """Returns the part of consecutive indices that a rank holds, as DTensor and FSDP divide a dimension: all parts are equal, but
    the last ones can be shorter or empty."""
    size = -(-len(indices) // num_shards)
    return indices[rank * size : (rank + 1) * size]


def split_blocks(num_blocks: int, num_stages: int, lm_head_cost: float) -> list[int]:
    """Balances blocks over pipeline stages. Returns the number of blocks of each stage, at least one.

    Minimizes the cost of the slowest stage. `lm_head_cost` is the cost of the LM head in blocks; the embedding is a look-up
    and costs nothing.
    """
    return list(_split_blocks(num_blocks, num_stages, lm_head_cost))


@cache  # the planner asks for the same few very often
def _split_blocks(num_blocks: int, num_stages: int, lm_head_cost: float) -> tuple[int, ...]:
    if num_stages == 1:
        return (num_blocks,)
    split = [1] * num_stages
    costs = [1.0] * (num_stages - 1) + [1.0 + lm_head_cost]
    for _ in range(num_blocks - num_stages):
        # Prefer later stages among equals: earlier ones hold more activations in flight.
        cheapest = min(reversed(range(num_stages)), key=lambda stage: costs[stage])
        split[cheapest] += 1
        costs[cheapest] += 1.0
    return tuple(split)


def stages_of(rank: int, num_ranks: int, num_stages: int, *, v_shaped: bool) -> list[int]:
    """Returns the stages of a pipeline rank, in ascending order."""
    return [stage for stage in range(num_stages) if rank_of(stage, num_ranks, v_shaped=v_shaped) == rank]


def rank_of(stage: int, num_ranks: int, *, v_shaped: bool) -> int:
    """Returns the pipeline rank of a stage. Assignment is round-robin, or in a V for `v_shaped` schedules."""
    repeat, rank = divmod(stage, num_ranks)
    return num_ranks - 1 - rank if v_shaped and repeat % 2 else rank


def blocks_of(stage: int, split: Sequence[int]) -> range:
    """Returns the block indices of a stage."""
    first = sum(split[:stage])
    return range(first, first + split[stage])


def infer_shard(dimensions: Mapping[str, int], world_size: int) -> int:
    """Returns the size of the `shard` dimension, inferring -1 from the world size.

    Raises `UserError` if the product of the dimensions is not the world size.
    """
    shard = dimensions["shard"]
    others = {name: size for name, size in dimensions.items() if name != "shard" and size > 1}
    product = math.prod(others.values())
    if shard == 0 or shard < -1:
        raise UserError(f"parallelism.shard = {shard} is not a number of ranks; use 1 or more, or -1 to infer it")
    if shard == -1 and world_size % product == 0:
        return world_size // product
    if shard == -1 and others.keys() == {"replicate"}:
        near = [n for n in divisors(world_size) if n < product][-3:] + [n for n in divisors(world_size) if n > product][
            :1
        ]
        raise UserError(
            f"parallelism.replicate = {product} does not divide the {world_size} processes; use {one_of(near)}"
        )
    if shard == -1:
        raise UserError(
            f"parallelism.{_product(others)} does not divide the {world_size} processes; start {product} or a multiple, or make "
            f"{'it' if len(others) == 1 else 'one of them'} smaller"
        )
    if product * shard != world_size:
        used = {name: size for name, size in dimensions.items() if name in (*others, "shard")}
        raise UserError(
            f"parallelism.{_product(used)}, but there are {world_size} processes; start "
            f"{product * shard}" + ("" if world_size % product else ", or set parallelism.shard = -1")
        )
    return shard


@dataclass(frozen=True)
class BatchSizes:
    """The number of sequences of each step: first `ramp`, pairs of a number of steps and a size, then `final`."""

    final: int
    ramp: Ramp = ()

    def stages(self) -> Iterator[tuple[int, int, int]]:
        """Yields the stages of the ramp: the first step, the number of steps and the size of each."""
        first = 1
        for num_steps, size in self.ramp:
            yield first, num_steps, size
            first += num_steps
        yield first, LIMIT, self.final

    def constant_around(self, step: int) -> tuple[range, int]:
        """Returns the steps of the stage that contains a step, and the size of their batches."""
        return next((range(first, first + n), size) for first, n, size in self.stages() if step < first + n)

    def of(self, step: int) -> int:
        """Returns the number of sequences of a step, which counts from 1."""
        return self.constant_around(step)[1]

    def through(self, step: int) -> int:
        """Returns the number of sequences of all steps up to and including this one."""
        return sum(num_steps * size for num_steps, size in self.until(step))

    def until(self, step: int) -> list[tuple[int, int]]:
        """Returns the number of steps and the size of each stage up to and including this step."""
        merged: list[tuple[int, int]] = []
        for first, n, size in self.stages():
            if (num_steps := min(n, step - first + 1)) > 0:
                same = merged.pop() if merged and merged[-1][1] == size else (0, size)
                merged.append((same[0] + num_steps, size))
        return merged

    def divisor(self) -> int:
        """Returns the greatest number that divides all sizes."""
        return math.gcd(self.final, *(size for _, size in self.ramp))


def num_microbatches(global_batch_size: int, local_batch_size: int, num_data_ranks: int) -> int:
    """Returns the number of forward and backward passes of one rank in a step.

    Raises `UserError` if the batch sizes do not divide evenly.
    """
    share, rest = divmod(global_batch_size, num_data_ranks)
    if rest:
        multiples = [n * num_data_ranks for n in (share, share + 1) if n]
        raise UserError(
            f"training.global_batch_size = {global_batch_size} does not divide over {num_data_ranks} data-parallel ranks; "
            f"use {one_of(multiples)}, or another number of processes"
        )
    if share % min(local_batch_size, share):
        near = [n for n in divisors(share) if n < local_batch_size][-2:]
        near += [n for n in divisors(share) if n > local_batch_size][:1]
        raise UserError(
            f"training.local_batch_size = {local_batch_size} does not divide the {share} sequences of a rank "
            f"(global_batch_size {global_batch_size} over {num_data_ranks} data-parallel ranks); use {one_of(near)}"
        )
    return share // min(local_batch_size, share)


def _product(sizes: Mapping[str, int]) -> str:
    """Formats dimensions as "replicate x shard = 2 x 4 = 8", or a single one as "shard = 4"."""
    text = f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}"
    return text if len(sizes) == 1 else f"{text} = {math.prod(sizes.values())}"
