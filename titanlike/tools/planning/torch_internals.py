"""Private APIs of torch that tools use, each with the reason. `titanlike.utils.compat` has those that training uses."""

import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import pipelining

# As `titanlike.utils.compat.REQUIRED`.
REQUIRED = (
    ("torch", "_scaled_mm", "calibration of float8 matmuls"),
    ("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime._prepare_schedule_with_comms", "`titanlike plan`"),
    ("torch._inductor.config", "fallback_random", "`titanlike verify --compile`"),
)  # fmt: skip


def eager_random_numbers() -> AbstractContextManager[None]:
    """Has code that is compiled in the context draw the random numbers of eager code. The public option is for one backend only."""
    config: Any = importlib.import_module("torch._inductor.config")
    found: AbstractContextManager[None] = config.patch(fallback_random=True)
    return found


def float8_matmul(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """Returns the product of two float8 matrices in bfloat16. The second one is transposed in memory. Both have the same scale."""
    return torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


class _StageStandIn:
    """What a pipeline schedule reads of its stages while it is built, without processes."""

    submod = None

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, num_stages, num_ranks, 0


def pipeline_order(
    schedule: str, num_ranks: int, num_stages: int, num_microbatches: int
) -> list[list[tuple[int, str, int]]]:
    """Returns what each rank computes with one of torch's pipeline schedules with several stages per rank, in order: the stage,
    F, B, I or W as torch abbreviates the kind of computation, and the micro-batch. Raises `ValueError` if it does not support these
    numbers."""
    base = getattr(pipelining, schedule)
    # The communication is not of interest here, and adding it takes seconds if there are hundreds of micro-batches.
    order_only = type(schedule, (base,), {"_prepare_schedule_with_comms": lambda *args: None})
    stages = [_StageStandIn(index, num_stages, num_ranks) for index in range(0, num_stages, num_ranks)]
    orders = order_only(stages, num_microbatches).pipeline_order
    return [
        [
            (each.stage_index, each.computation_type.value, each.microbatch_index)
            for action in orders[rank]
            if action is not None
            for each in action.sub_actions or (action,)
        ]
        for rank in range(num_ranks)
    ]
