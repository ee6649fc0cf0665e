"""What replaces operators of a model while it is simulated with fake tensors, so that they allocate as on GPUs."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.simulated_memory.fakes import efficient_attention
from titanlike.config.sections import Float8
from titanlike.models.common import layers
from titanlike.models.moe.config import MoeConfig
from titanlike.parallelisms import context, expert
from titanlike.tools.planning.job import Job
from titanlike.utils import compat


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates what the fused RMSNorm of GPUs does: it saves its input and one number for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


@contextmanager
def gpu_operators(flex: bool) -> Iterator[None]:
    """Replaces RMSNorm, which a CPU computes by several operators that save more for the backward pass if they are not compiled,
    attention with soft-capped scores or sinks, of which FlexAttention keeps no scores, attention with biases, and attention with
    context parallelism, which needs no mask on GPUs."""

    def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            return original_norm(x, shape, weight, eps)
        return _FusedRMSNorm.apply(x, weight)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor, soft_cap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        if mask.is_floating_point():
            return efficient_attention(q, k, v, mask)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out if sinks is None else out * (out[..., :1] - sinks[:, None, None]).sigmoid()  # of its statistics

    def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            return efficient_attention(q, k, v, mask)
        if q.shape[-1] == v.shape[-1]:
            return original(q, k, v, **options)
        return efficient_attention(q, k, v)

    def prefix_attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, soft_cap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        if mask is not None:
            return attention(q, k, v, mask, soft_cap, sinks)
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1])) if q.shape[-1] != v.shape[-1] else v
        return compat.flash_attention_of_last_queries(q, k, padded)[..., : v.shape[-1]]

    original: Any = F.scaled_dot_product_attention
    original_norm: Any = F.rms_norm
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(F, "rms_norm", rms_norm))
        patches.enter_context(mock.patch.object(F, "scaled_dot_product_attention", dot_product_attention))
        patches.enter_context(mock.patch.object(context, "prefix_attention", prefix_attention))
        for module in (layers, context) if flex else ():
            patches.enter_context(mock.patch.object(module, "masked_attention", attention))
        yield


def balanced_experts(job: Job) -> AbstractContextManager[Any]:
    """Has expert-parallel ranks exchange as many tokens as with equal experts: fake tensors have no counts."""
    if not isinstance(job.recipe.model, MoeConfig) or job.layout.expert == 1:
        return nullcontext()
    rows, rest = divmod(job.tokens * job.recipe.model.experts_per_token, job.layout.expert)
    sizes = [rows + (rank < rest) for rank in range(job.layout.expert)]

    def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[int], list[int]]:
        return torch.zeros_like(counts), sizes, sizes

    return mock.patch.object(expert, "exchange_counts", exchange_counts)


def any_hardware(float8: Float8) -> AbstractContextManager[Any]:
    """Allows float8 without a GPU that supports it: fake tensors need none."""
    if float8.scaling == "none":
        return nullcontext()
    from titanlike.float8 import linear  # torchao takes two seconds

    return mock.patch.object(linear, "check_hardware")
