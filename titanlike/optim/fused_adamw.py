"""AdamW on GPUs: one kernel for all weights, which also clips their gradients.

`torch.optim.AdamW(fused=True)` is one kernel, too, but reads gradients that another one has read and written to clip them.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 4096  # elements of a program
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}  # Triton 3.10 will not contract `a * b + c` by default
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ALIGNMENT = 16  # bytes, and elements: loads of several elements


@triton.jit
def _update(  # noqa: ANN202
    pointers, chunks, factor, lr, decay, correction, root, beta1, beta2, eps,  # noqa: ANN001
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index, part = tl.load(chunks + 2 * tl.program_id(0)), tl.load(chunks + 2 * tl.program_id(0) + 1)
    row = pointers + 5 * index
    size = tl.load(row + 4)
    weights = tl.load(row).to(tl.pointer_type(DTYPE))
    gradients = tl.load(row + 1).to(tl.pointer_type(DTYPE))
    means = tl.load(row + 2).to(tl.pointer_type(DTYPE))
    squares = tl.load(row + 3).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        weights, gradients = tl.multiple_of(weights, 16), tl.multiple_of(gradients, 16)
        means, squares = tl.multiple_of(means, 16), tl.multiple_of(squares, 16)
    at = part.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = at < size
    gradient = tl.load(gradients + at, mask=mask, other=0.0).to(tl.float32) * tl.load(factor)
    mean = tl.load(means + at, mask=mask, other=0.0).to(tl.float32)
    square = tl.load(squares + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weights + at, mask=mask, other=0.0).to(tl.float32)
    mean += (1.0 - beta1) * (gradient - mean)
    square = beta2 * square + (1.0 - beta2) * gradient * gradient
    weight = weight * decay - (lr / correction) * mean / (tl.sqrt(square) / root + eps)
    tl.store(weights + at, weight.to(DTYPE), mask=mask)
    tl.store(means + at, mean.to(DTYPE), mask=mask)
    tl.store(squares + at, square.to(DTYPE), mask=mask)


@cache
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the tensor, and the part of it, that each program updates."""
    counts = [-(-size // SIZE) for size in sizes]
    index = np.repeat(np.arange(len(sizes)), counts)
    part = np.concatenate([np.arange(count) for count in counts])
    return torch.tensor(np.stack((index, part), axis=1), dtype=torch.int32, device=device)


def update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    factor: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Updates weights, both moments and numbers of steps in place, in float32, from gradients times `factor`.

    Args:
        weights: contiguous, on one device, as are the moments.
        steps: on the CPU.
        factor: a number on the device of the weights. Default: 1.
    """
    device = weights[0].device
    factor = torch.ones((), device=device) if factor is None else factor
    alike: dict[tuple[torch.dtype, float], list[tuple[Tensor, ...]]] = {}
    for weight, gradient, mean, square, step in zip(weights, gradients, means, squares, steps, strict=True):
        step += 1
        alike.setdefault((weight.dtype, step.item()), []).append((weight, gradient.contiguous(), mean, square))
    for (dtype, number), tensors in alike.items():
        rows = [(*(each.data_ptr() for each in one), one[0].numel()) for one in tensors]
        aligned = all(value % ALIGNMENT == 0 for row in rows for value in row)
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=weights[0].is_cuda).to(device, non_blocking=True)
        chunks = _chunks(tuple(row[-1] for row in rows), device)
        _update[(len(chunks),)](
            table, chunks, factor, lr, 1.0 - lr * weight_decay, 1.0 - beta1**number, math.sqrt(1.0 - beta2**number),
            beta1, beta2, eps, DTYPE=DTYPES[dtype], ALIGNED=aligned, SIZE=SIZE, **OPTIONS,
        )  # fmt: skip
