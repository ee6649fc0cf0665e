"""What a model has counted in a step: the terms of its loss, and the balance of its experts. Equal under every layout."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.distributed.collectives import all_reduce_sum, sum_dtype, sum_over_mesh
from titanlike.models.common.experts import load_of, routers


def model_statistics(model: nn.Module, device: torch.device) -> "ModelStatistics | None":
    """Returns the statistics of a model of `parallelize`, or None if it counts nothing."""
    parts: Any = getattr(model, "parts", {0: model})  # the stages of a pipeline
    num_experts = getattr(getattr(next(iter(parts.values())), "config", None), "num_experts", 0)
    terms = getattr(model, "loss_terms", None)
    return ModelStatistics(model, device, terms, num_experts) if terms is not None or num_experts else None


class ModelStatistics:
    """Reads and resets what a model counts.

    Args:
        terms: a `losses.terms.LossTerms`, if the model has such terms.
        num_experts: 0 without experts; on all pipeline stages the same.
    """

    def __init__(self, model: nn.Module, device: torch.device, terms: Any, num_experts: int) -> None:
        self.device, self.terms, self.num_experts = device, terms, num_experts
        self.routers: list[Any] = []
        if num_experts:
            self.routers = list(routers(model))
        mesh: Any = model.mesh if hasattr(model, "parts") else None
        self.pipeline_group: Any = None if mesh is None else mesh.get_group()

    @torch.no_grad()
    def measure(self) -> dict[str, Tensor]:
        """Returns the metrics of the step, on the device. Collective."""
        found: dict[str, Tensor] = {}
        if self.terms is not None:
            sums = self.terms.sums
            if sums is None:  # a pipeline stage without the loss
                sums = torch.zeros(len(self.terms.names), 2, device=self.device, dtype=sum_dtype(self.device))
            # A rank that computes the same tokens as another one adds the same to sum and number.
            sums = all_reduce_sum(sums.clone(), [dist.group.WORLD] if dist.group.WORLD is not None else [])
            found |= zip(self.terms.names, sums[:, 0] / sums[:, 1], strict=True)
        return found | self._balance() if self.num_experts else found

    def _balance(self) -> dict[str, Tensor]:
        """Returns, relative to a uniform distribution, the load of the most loaded expert in the block where it is largest, and the
        entropy of the load in the block where it is smallest."""
        extremes = torch.full((2,), -torch.inf, device=self.device, dtype=sum_dtype(self.device))
        load = load_of(self.routers)  # (routers, E)
        if load is not None:
            load = sum_over_mesh(load, self.routers[0].weight)
            fractions = load.to(extremes.dtype) / load.sum(1, keepdim=True)
            # Not `special.entr`, a kernel that CUDA compiles at its first call.
            logs = fractions.clamp_min(torch.finfo(fractions.dtype).tiny).log()
            entropies = -(fractions * logs).sum(1) / math.log(self.num_experts)
            extremes = torch.stack((fractions.max() * self.num_experts, -entropies.min()))
        if self.pipeline_group is not None:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, self.pipeline_group)
        return {"experts/max_load": extremes[0], "experts/entropy": -extremes[1]}

    def reset(self) -> None:
        """Begins the next step."""
        if self.terms is not None:
            self.terms.reset()
        for router in self.routers:
            router.reset_load()
