"""Balanced routing of mixtures of experts on the null device: the host reads how many rows each rank sends, which no kernel has
counted."""

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.models.common.experts import Experts
from titanlike.parallelisms import expert


def balance() -> None:
    """Has each rank send the same number of rows to each expert."""
    forward = Experts.forward
    num_rows = 0

    def count_rows(experts: Experts, x: Tensor, weights: Tensor, indices: Tensor, load: Tensor) -> Tensor:
        nonlocal num_rows
        if not torch.compiler.is_compiling():  # with expert parallelism, which reads the number
            num_rows = indices.numel()
        return forward(experts, x, weights, indices, load)

    def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[int], list[int]]:
        received, _, _ = exchange(counts, group)
        per_rank = [num_rows // group.size()] * group.size()
        return received, per_rank, per_rank

    exchange = expert.exchange_counts
    Experts.forward = count_rows  # type: ignore[method-assign, assignment]
    expert.exchange_counts = exchange_counts
