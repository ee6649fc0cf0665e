"""Cross-entropy on GPUs in one kernel: it reads the logits of a row twice, and writes their gradient in their place.

The compiler's kernels read them three times, with three times the instructions for each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES, WIDTH = 1024, 8  # of a program: threads, and logits that a thread loads at once
OPTIONS = {"num_warps": LANES // 32, "enable_fp_fusion": True}
LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction


@triton.jit
def _rows(  # noqa: ANN202
    logits, labels, scales, losses, z_losses, z_loss,  # noqa: ANN001
    SIZE: tl.constexpr, SCALES: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * SIZE
    step: tl.constexpr = LANES * WIDTH
    whole: tl.constexpr = SIZE // step * step  # without a mask
    at = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    largest = tl.full(
        [LANES], float("-inf"), tl.float32
    )  # of each thread, as is the sum of exponentials relative to it
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, whole, step):
        largest, total = _added(tl.load(logits + first + at).to(tl.float32), largest, total)
    if whole < SIZE:
        rest = tl.load(logits + whole + at, mask=whole + at < SIZE, other=float("-inf")).to(tl.float32)
        largest, total = _added(rest, largest, total)
    label = tl.load(labels + row)
    has_label = label >= 0
    label = tl.where(has_label, label, 0)
    label_logit = tl.load(logits + label).to(tl.float32)
    tl.debug_barrier()  # before another thread overwrites it
    maximum = tl.max(largest)
    # A thread without logits has a sum of 0 relative to -inf.
    total = tl.sum(tl.where(total > 0.0, total * tl.exp2((largest - maximum) * LOG2E), 0.0))
    log2_sum = maximum * LOG2E + tl.log2(total)
    log_sum = log2_sum / LOG2E
    z_term = z_loss * log_sum * log_sum
    tl.store(losses + row, tl.where(has_label, log_sum - label_logit + z_term, 0.0))
    tl.store(z_losses + row, tl.where(has_label, z_term, 0.0))
    scale = 1.0 if SCALES is None else tl.load(scales + row * SCALES)
    of_probability = (1.0 + 2.0 * z_loss * log_sum) * scale
    for first in range(0, whole, step):
        value = tl.load(logits + first + at).to(tl.float32)
        gradient = tl.exp2(value * LOG2E - log2_sum) * of_probability - tl.where(first + at == label, scale, 0.0)
        tl.store(logits + first + at, tl.where(has_label, gradient, 0.0).to(logits.dtype.element_ty))
    if whole < SIZE:
        value = tl.load(logits + whole + at, mask=whole + at < SIZE, other=0.0).to(tl.float32)
        gradient = tl.exp2(value * LOG2E - log2_sum) * of_probability - tl.where(whole + at == label, scale, 0.0)
        gradient = tl.where(has_label, gradient, 0.0).to(logits.dtype.element_ty)
        tl.store(logits + whole + at, gradient, mask=whole + at < SIZE)


@triton.jit
def _added(values, largest, total):  # noqa: ANN001, ANN202
    new = tl.maximum(largest, tl.max(values, axis=1))
    finite = tl.where(new > float("-inf"), new, 0.0)  # -inf - -inf is not a number
    terms = tl.exp2(values * LOG2E - (finite * LOG2E)[:, None])
    return new, total * tl.exp2((largest - finite) * LOG2E) + tl.sum(terms, axis=1)


def cross_entropy_inplace(
    logits: Tensor, labels: Tensor, vocab_group: None, z_loss: float | None, soft_cap: float, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Computes what `cross_entropy.cross_entropy_inplace` does, for the whole vocabulary and without a soft cap."""
    assert vocab_group is None and not soft_cap and logits.is_contiguous()
    losses, z_losses = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    _rows[(len(logits),)](
        logits, labels, scale, losses, z_losses, z_loss or 0.0, SIZE=logits.shape[1],
        SCALES=None if scale is None else scale.stride(0), LANES=LANES, WIDTH=WIDTH, **OPTIONS,
    )  # fmt: skip
    return losses.sum(), None if z_loss is None else z_losses.sum()
