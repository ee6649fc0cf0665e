"""The gate of GPT-OSS's experts: a product of two inputs, both of which are bounded, with a steeper sigmoid than in SiLU.

Shapes: M rows, F hidden dimension of an expert.
"""

from typing import Any

import torch
from torch import Tensor

SLOPE = 1.702  # of the sigmoid


def clamped_swiglu(gate: Tensor, x: Tensor, limit: float) -> Tensor:
    """Returns gate * sigmoid(SLOPE * gate) * (x + 1) for inputs (M, F), of which the gate is at most `limit`, and x at most as far
    from 0. It keeps its two inputs for the backward pass, and little more memory is in use at a time in eager code."""
    return _ClampedSwiGLU.apply(gate, x, limit)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate, x)
        ctx.limit = limit
        bounded = gate.clamp(max=limit)
        bounded.mul_(bounded.mul(SLOPE).sigmoid_())
        return x.clamp(-limit, limit).add_(1.0).mul_(bounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, x = ctx.saved_tensors
        bounded = gate.clamp(max=ctx.limit)
        sigmoid = bounded.mul(SLOPE).sigmoid_()
        # The derivative of gate * sigmoid(SLOPE * gate): sigmoid * (1 + SLOPE * gate * (1 - sigmoid)).
        gate_gradient = bounded.mul(SLOPE)
        gate_gradient.addcmul_(gate_gradient, sigmoid, value=-1.0).add_(1.0).mul_(sigmoid)
        x_gradient = bounded.mul_(sigmoid).mul_(gradient).masked_fill_((x > ctx.limit).logical_or_(x < -ctx.limit), 0.0)
        other = sigmoid.copy_(x).clamp_(-ctx.limit, ctx.limit).add_(1.0)  # in the memory of the sigmoid
        return gate_gradient.mul_(other).mul_(gradient).masked_fill_(gate > ctx.limit, 0.0), x_gradient, None
