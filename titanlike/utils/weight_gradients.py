"""Gradients that are added to `weight.grad` where they are computed: autograd would write and read each of them to add it.

Backward functions take `weight.grad` from the weight, add to it, and return it to autograd, which makes it `weight.grad` again, in
`accumulate_in_place` only: what `torch.autograd.grad` returns is not the sum, and it changes no `weight.grad`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BLOCK_ROWS = 4096  # of a product, added at once where the matmul cannot add

_in_place = False


@contextmanager
def accumulate_in_place(enabled: bool = True) -> Iterator[None]:
    """For a call of `backward`, which adds to the `grad` of all weights that it reaches. No weight may be sharded."""
    global _in_place
    _in_place = enabled
    try:
        yield
    finally:
        _in_place = False


def can_accumulate(weight: Tensor) -> bool:
    """Whether functions may change `weight.grad`. Hooks have to see what autograd adds, and sums are in float32."""
    in_float32 = weight.dtype == torch.float32
    return _in_place and in_float32 and weight.is_leaf and weight.requires_grad and not weight._backward_hooks


def take(weight: Tensor) -> Tensor | None:
    """Returns `weight.grad`, which the weight no longer has: add to it, and return it to autograd. None: autograd adds."""
    if not can_accumulate(weight) or weight.grad is None or not weight.grad.is_contiguous():
        return None
    total, weight.grad = weight.grad, None
    return total


@torch.library.custom_op("titanlike::weight_gradient", mutates_args=())
def weight_gradient(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns `left @ right`, the gradient of a weight, in its dtype, or `weight.grad` with the product added. The compiler does
    not trace it: whether there is a `weight.grad` is known when it runs."""
    total, dtype = take(weight), weight.dtype
    if total is None:  # only CUDA has the first matmul
        return torch.mm(left, right, out_dtype=dtype) if weight.is_cuda else left.to(dtype) @ right.to(dtype)
    add_product(total, left, right)
    return total


@weight_gradient.register_fake
def _(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return weight.new_empty(weight.shape)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, replace: bool = False) -> None:
    """Adds `left @ right` to `total`, which may be in float32 while the factors are not, or replaces it."""
    if replace and (total.dtype == left.dtype or torch.compiler.is_compiling()):
        total.copy_(left @ right if total.dtype == left.dtype else torch.mm(left, right, out_dtype=total.dtype))
    elif replace:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.compiler.is_compiling():  # inductor of torch 2.14 does not have the next one
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # only CUDA has this matmul; some rows at a time, because a product takes memory
        for first in range(0, total.shape[0], BLOCK_ROWS):
            rows = slice(first, first + BLOCK_ROWS)
            total[rows].add_(left[rows] @ right)
