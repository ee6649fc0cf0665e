"""Who holds what: pure arithmetic on ranks, stages and blocks, for the checks, the pipeline and the screen alike. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlike.config.base import UserError, one_of

# From the outermost to the innermost: neighbours in the last dimension talk most, so they sit on one machine.
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")

# Neighbours in a row that share a scale in an optimizer of 8 bits. No cut may go through them.
BLOCK = 64


@dataclass(frozen=True)
class Schedule:
    """The order in which a pipeline takes micro-batches forward and backward."""

    torch_class: str
    stages_per_rank: int = 1  # unless the recipe says otherwise, ...
    fixed: bool = True  # ... which it may not here
    v_shaped: bool = False  # the second half of the stages runs back over the ranks, so the first holds both ends
    splits_backward: bool = False  # gradients of weights are computed apart from those of activations, to fill gaps


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe"),
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", stages_per_rank=2, fixed=False),
    "zero_bubble": Schedule("ScheduleInterleavedZeroBubble", stages_per_rank=2, fixed=False, splits_backward=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", stages_per_rank=2, v_shaped=True, splits_backward=True),
    "dualpipev": Schedule("ScheduleDualPipeV", stages_per_rank=2, v_shaped=True, splits_backward=True),
}


def split_blocks(num_blocks: int, num_stages: int, head: float) -> list[int]:
    """How many blocks each stage gets, so that the slowest is as fast as can be. The head counts as so many blocks; the
    embedding multiplies nothing and counts as none. Each stage gets one at least."""
    split = [1] * num_stages
    costs = [1.0] * (num_stages - 1) + [1.0 + head]
    for _ in range(num_blocks - num_stages):
        # Of equals the last: the first stage keeps most activations waiting.
        least = min(reversed(range(num_stages)), key=lambda stage: costs[stage])
        split[least] += 1
        costs[least] += 1.0
    return split


def stages_of(rank: int, num_ranks: int, num_stages: int, *, v_shaped: bool) -> list[int]:
    """The stages that a rank of the pipeline holds, in their order."""
    return [stage for stage in range(num_stages) if rank_of(stage, num_ranks, v_shaped=v_shaped) == rank]


def rank_of(stage: int, num_ranks: int, *, v_shaped: bool) -> int:
    """The rank of the pipeline that holds a stage: round and round, or there and back."""
    lap, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if v_shaped and lap % 2 else place


def blocks_of(stage: int, split: Sequence[int]) -> range:
    """The numbers of a stage's blocks."""
    first = sum(split[:stage])
    return range(first, first + split[stage])


def ranks_left(dimensions: Mapping[str, int], world_size: int) -> int:
    """How many of all ranks are for `shard`, where that is -1, or an error if the ranks do not come out even."""
    shard = dimensions["shard"]
    others = {name: size for name, size in dimensions.items() if name != "shard" and size > 1}
    product = math.prod(others.values())
    if shard == 0 or shard < -1:
        raise UserError(f"parallelism.shard = {shard} is not a number of ranks; use 1 or more, or -1 for all left")
    if shard == -1 and world_size % product == 0:
        return world_size // product
    if shard == -1 and others.keys() == {"replicate"}:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(
            f"parallelism.replicate = {product} does not divide the {world_size} processes; use {one_of(divisors)}"
        )
    if shard == -1:
        named = _product(others) if len(others) == 1 else f"{_product(others)} = {product}"
        raise UserError(
            f"parallelism.{named} does not divide the {world_size} processes; start {product} or a multiple, or make "
            f"{'it' if len(others) == 1 else 'one of them'} smaller"
        )
    if product * shard != world_size:
        sizes = {name: size for name, size in dimensions.items() if name in (*others, "shard")}
        raise UserError(
            f"parallelism.{_product(sizes)} = {product * shard}, but there are {world_size} processes; start "
            f"{product * shard}" + ("" if world_size % product else ", or set parallelism.shard = -1")
        )
    return shard


def num_microbatches(global_batch_size: int, local_batch_size: int, num_data_ranks: int) -> int:
    """Passes that one rank makes in a step, or an error if the sequences do not come out even."""
    share, rest = divmod(global_batch_size, num_data_ranks)
    if rest:
        multiples = [n * num_data_ranks for n in (share, share + 1) if n]
        raise UserError(
            f"training.global_batch_size = {global_batch_size} does not divide over {num_data_ranks} data ranks; "
            f"use {one_of(multiples)}, or another number of processes"
        )
    if share % min(local_batch_size, share):
        divisors = [n for n in range(1, local_batch_size) if share % n == 0]
        raise UserError(
            f"training.local_batch_size = {local_batch_size} does not divide the {share} sequences of a rank "
            f"(global_batch_size {global_batch_size} over {num_data_ranks} data ranks); use {one_of(divisors[-3:])}"
        )
    return share // min(local_batch_size, share)


def _product(sizes: Mapping[str, int]) -> str:
    """As in "replicate x shard = 2 x 4"."""
    return f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}"
