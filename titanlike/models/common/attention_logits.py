"""The largest attention logit of each head, computed in blocks from the queries and keys of the forward pass.

An operator of its own: the compiler does not trace it, and activation checkpointing computes it again with the same result.

Shapes: B sequences, T queries, S keys, H query heads, K key/value heads, E head dimension.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn

MAX_SCORES = 2**24  # that exist at the same time


@torch.library.custom_op("titanlike::record_max_logits", mutates_args=("maxima",))
def record_max_logits(
    q: Tensor,
    k: Tensor,
    mask: Optional[Tensor],  # noqa: UP045  torch reads the annotation
    position_ids: Optional[Tensor],  # noqa: UP045
    maxima: Tensor,
) -> None:
    """Raises `maxima` (H,) to the largest scores of queries (B, H, T, E) and keys (B, K, S, E): of the pairs that a dense mask
    (B, 1, T, S) allows or, without one, of a key at most as far as the query. `position_ids` (T,) are the positions of the queries;
    without them, they are the first T."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    rows = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * num_keys))
    positions = torch.arange(num_queries, device=q.device) if position_ids is None else position_ids
    for first in range(0, num_queries, rows):
        part = slice(first, first + rows)
        end = min(first + rows, num_keys) if mask is None and position_ids is None else num_keys
        scores = q[:, :, part].unflatten(1, (k.shape[1], -1)) @ k[:, :, None, :end].mT  # (B, K, H / K, rows, end)
        causal = torch.arange(end, device=q.device) <= positions[part, None]
        allowed = causal if mask is None else mask[:, :, None, part]
        largest = scores.masked_fill(~allowed, -torch.inf).amax((0, 3, 4)).flatten()
        maxima.copy_(torch.maximum(maxima, largest.float() * q.shape[-1] ** -0.5))


@record_max_logits.register_fake
def _(*arguments: Any) -> None:
    pass


def record_logits(attention: nn.Module, num_heads: int, device: torch.device) -> Tensor:
    """Has a `DotProductAttention` record the largest logit of each of this rank's heads in training. Returns the tensor (H,) that
    holds them, which starts with -inf."""
    maxima = torch.full((num_heads,), -torch.inf, device=device)
    attention.logit_maxima = maxima
    attention.register_forward_pre_hook(_record)
    return maxima


def _record(attention: Any, arguments: tuple[Any, ...]) -> None:
    if not torch.is_grad_enabled():
        return
    q, k, _, *rest = arguments
    mask, positions = (rest[0] if rest else None), None
    assert mask is None or isinstance(mask, Tensor)  # the preflight checks refuse block masks
    q, k = q.detach(), k.detach()
    if hasattr(attention, "all_keys"):  # with context parallelism
        k, positions = attention.all_keys(k)
    record_max_logits(q, k, mask, positions, attention.logit_maxima)
