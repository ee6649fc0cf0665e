"""Has all experts compute the same number of tokens, as the planner assumes."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.models.common.experts import Routes, routers
from titanlike.models.moe.config import MoeConfig
from titanlike.parallelisms import expert


def balance_experts(model: nn.Module) -> None:
    """Has each router of a model select experts by turns, whatever their scores."""
    for router in routers(model):
        router.forward = partial(route_by_turns, router.forward, router.config)  # type: ignore[method-assign]


def route_by_turns(forward: Any, config: MoeConfig, x: Tensor) -> Routes:
    """Returns the weights of a router, and other experts."""
    weights, indices, load, counts = forward(x)
    by_turns = torch.arange(indices.numel(), device=x.device).view_as(indices) % config.num_experts
    return Routes(weights, by_turns, load.fill_(indices[0].numel() // config.num_experts), counts)


def balanced_exchanges() -> AbstractContextManager[Any]:
    """Has an expert-parallel rank receive from the others, which do not exist, as many tokens as it computes of its own."""
    original = expert.exchange_counts

    def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[int], list[int]]:
        original(counts, group)  # a collective, which is counted
        received = counts[group.rank()].expand_as(counts)
        return received, received.sum(1).tolist(), counts.sum(1).tolist()

    return mock.patch.object(expert, "exchange_counts", exchange_counts)
