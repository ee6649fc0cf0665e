"""Private APIs of torch that the planner uses, each with the reason. `titanlike.utils.compat` has those that training uses."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import pipelining
from torch.distributed.tensor import debug
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves

# As `titanlike.utils.compat.REQUIRED`.
REQUIRED = (
    ("torch._subclasses.fake_tensor", "FakeTensorMode", "memory of a simulated step"),
    ("torch", "ops.aten._local_scalar_dense.default", "memory of a simulated step"),
    ("torch", "ops.aten._scaled_dot_product_efficient_attention.default", "memory of a simulated step"),
    ("torch", "_scaled_mm", "calibration of float8 matmuls"),
    ("torch.utils._python_dispatch", "TorchDispatchMode", "memory of a simulated step"),
    ("torch.utils._python_dispatch", "is_traceable_wrapper_subclass", "memory of a simulated step"),
    ("torch.utils._pytree", "tree_leaves", "memory of a simulated step"),
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache", "memory of a simulated step"),
    ("torch.testing._internal.distributed.fake_pg", "FakeStore", "memory of a simulated step"),
    ("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime._prepare_schedule_with_comms", "`titanlike plan`"),
)  # fmt: skip


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Initializes the process group of one rank without the others: collectives return at once and communicate with nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # The results of DTensor's sharding rules refer to the process groups of the first mesh of each shape.
        debug._clear_sharding_prop_cache()


def fake_tensors() -> AbstractContextManager[Any]:
    """Returns a context in which tensors have no data. Operators also take tensors from outside, as of the meta device."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_read_on_host(operator: Any) -> bool:
    """Whether an operator returns the value of a tensor as a number."""
    return operator is torch.ops.aten._local_scalar_dense.default


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


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns attention with biases of the scores, or causal attention for values of another size than queries and keys. Otherwise
    fake tensors would get operators that keep all scores, which GPUs do not use."""
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, is_causal=bias is None)[0]
    return out
