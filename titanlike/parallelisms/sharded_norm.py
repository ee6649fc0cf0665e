"""RMSNorm over channels that are sharded over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.distributed.autograd_collectives import all_reduce_no_grad


class ShardedRMSNorm(torch.autograd.Function):
    """Divides the channels that each rank has by the root mean square of all. For the backward pass it keeps the input and a number
    of each token; autograd would keep two products in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup) -> Tensor:
        h = x.float()
        mean = all_reduce_no_grad(h.square().mean(-1, keepdim=True), 0, group) / group.size()
        scale = (mean + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        ctx.group = group
        return (h * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        normalized, gradient = x.float() * scale, gradient.float()
        of_normalized = gradient * weight
        mean = (of_normalized * normalized).mean(-1, keepdim=True)
        mean = all_reduce_no_grad(mean, 0, ctx.group) / ctx.group.size()
        of_x = (of_normalized - normalized * mean) * scale
        of_weight = (gradient * normalized).flatten(0, -2).sum(0)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None, None
