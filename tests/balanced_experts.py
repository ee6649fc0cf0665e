"""Has all experts compute the same number of tokens, as the planner assumes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.models.common.experts import Routes, routers
from titanlike.models.moe.config import MoeConfig


def balance_experts(model: nn.Module) -> None:
    """Has each router of a model select experts by turns, whatever their scores."""
    for router in routers(model):
        router.forward = partial(route_by_turns, router.forward, router.config)  # type: ignore[method-assign]


def route_by_turns(forward: Any, config: MoeConfig, x: Tensor) -> Routes:
    """Returns the weights of a router, and other experts."""
    weights, indices, load, counts = forward(x)
    by_turns = torch.arange(indices.numel(), device=x.device).view_as(indices) % config.num_experts
    return Routes(weights, by_turns, load.fill_(indices[0].numel() // config.num_experts), counts)
