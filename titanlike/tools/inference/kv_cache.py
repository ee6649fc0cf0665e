"""The KV cache: attention that keeps the keys and values of earlier tokens, so that each step computes the new tokens only.

Shape legend: B sequences, T new tokens, S tokens in the cache, H query heads, K key/value heads, E head dimension.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.models.common.document_mask import DocumentMask, Mask, masked_attention
from titanlike.parallelisms.blocks import Blocks, list_blocks

NO_DOCUMENTS = "the KV cache does not support document_ids; pass one document per sequence"


class KVCache(AbstractContextManager["KVCache"]):
    """The caches of all blocks of a model. As a context manager, it restores the original attention at the end."""

    def __init__(
        self,
        owners: list[tuple[nn.Module, str, nn.Module | None]],
        attentions: list["CachedAttention"],
        document_masks: list[DocumentMask],
    ) -> None:
        self._owners = owners
        self._attentions = attentions
        self._document_masks = document_masks

    def start(self, padding: Tensor | None = None) -> None:
        """Empties the cache. `padding` (B,) is the number of tokens at the start of each sequence that are padding."""
        for attention in self._attentions:
            attention.length = 0
            attention.padding = padding if padding is not None and bool(padding.any()) else None

    def resize(self, length: int, max_length: int) -> None:
        """Keeps the first tokens, and makes room for `max_length`."""
        for attention in self._attentions:
            attention.resize(length, max_length)

    def remove(self) -> None:
        """Restores the original attention and frees the memory."""
        for parent, name, original in self._owners:
            setattr(parent, name, original)
        for document_mask in self._document_masks:
            vars(document_mask).pop("forward", None)
        self._owners, self._attentions, self._document_masks = [], [], []

    def __exit__(self, *error: object) -> None:
        self.remove()


def apply_kv_cache(
    blocks: Blocks,
    *,
    batch_size: int,
    max_length: int,
    attention: str = "attention.attend",
    document_masks: Iterable[DocumentMask] = (),
) -> KVCache:
    """Replaces the causal attention of each block by one that attends to the tokens of earlier calls too.

    The caller then passes the new tokens only, with their `position_ids`. Memory is allocated at the first call.

    Args:
        batch_size: number of sequences in each call.
        max_length: number of tokens that the cache holds, including padding.
        attention: name, in each block, of the submodule that is called with queries (B, H, T, E), and keys and values (B, K, T, E),
            as `DotProductAttention` is. Its attributes `soft_cap` and `window`, if it has them, are respected. An
            attention module with an attribute `latent_cache`, as `models.deepseek.LatentAttention`, gets a cache of latent vectors.
        document_masks: the modules of the model that make masks, which the cached attention makes by itself.
    """
    owners: list[tuple[nn.Module, str, nn.Module | None]] = []
    attentions: list[CachedAttention] = []
    for block in list_blocks(blocks):
        parent_name, _, name = attention.rpartition(".")
        try:
            parent = block.get_submodule(parent_name)
            original: nn.Module | None = parent.get_submodule(name)
        except AttributeError:
            raise UserError(
                f"the KV cache replaces the submodule {attention}, which {type(block).__name__} does not have; pass its name as "
                "attention=, or the blocks that have it"
            ) from None
        options = {name: getattr(original, name, 0) for name in ("soft_cap", "window")}
        cache_type = CachedAttention
        if hasattr(parent, "latent_cache"):
            name, original, cache_type = "latent_cache", None, CachedLatentAttention
        cached = cache_type(batch_size, max_length, **options)
        setattr(parent, name, cached)
        owners.append((parent, name, original))
        attentions.append(cached)
    masks = list(document_masks)
    for document_mask in masks:
        document_mask.forward = _no_mask  # type: ignore[method-assign]
    return KVCache(owners, attentions, masks)


def _no_mask(document_ids: Tensor | None, position_ids: Tensor | None = None) -> None:
    if document_ids is not None:
        raise UserError(NO_DOCUMENTS)


class CachedAttention(nn.Module):
    """Causal attention of new tokens over all tokens since `KVCache.start`."""

    def __init__(self, batch_size: int, max_length: int, *, soft_cap: float = 0.0, window: int = 0) -> None:
        super().__init__()
        self.batch_size, self.max_length = batch_size, max_length
        self.soft_cap, self.window = soft_cap, window
        self.length = 0
        self.padding: Tensor | None = None
        self.cache: tuple[Tensor, ...] | None = None  # keys and values (B, K, S, E)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, sinks: Tensor | None = None) -> Tensor:
        """Returns (B, H, T, E) for queries (B, H, T, E), keys and values (B, K, T, E), and attention sinks (H,)."""
        keys, values = self.append(mask, k, v)
        return self.attend(q, keys, values, sinks)

    def append(self, mask: Mask | None, *new: Tensor) -> list[Tensor]:
        """Adds tensors of the new tokens (B, K, T, E) to the cache. Returns the tensors of all tokens."""
        first, self.length = self.length, self.length + new[0].shape[2]
        self._check(new[0], mask)
        if self.cache is None:  # of this rank's heads
            self.cache = tuple(x.new_zeros(self.batch_size, x.shape[1], self.max_length, x.shape[3]) for x in new)
        for cached, x in zip(self.cache, new, strict=True):
            cached[:, :, first : self.length] = x
        return [cached[:, :, : self.length] for cached in self.cache]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Returns the attention of the new tokens over all."""
        first = self.length - q.shape[2]
        # The new tokens attend to none before the window of the first of them.
        start = max(0, first + 1 - self.window) if self.window else 0
        keys, values = keys[:, :, start:], values[:, :, start:]
        if self.padding is None and not self.soft_cap and sinks is None:
            options: dict[str, Any] = {"enable_gqa": q.shape[1] != keys.shape[1]}
            if q.shape[2] == 1:  # the last token attends to all
                return F.scaled_dot_product_attention(q, keys, values, **options)
            if not first and not 0 < self.window < self.length:
                return F.scaled_dot_product_attention(q, keys, values, is_causal=True, **options)
        return masked_attention(q, keys, values, self._mask(first, start, q.device), self.soft_cap, sinks)

    def resize(self, length: int, max_length: int) -> None:
        self.length, self.max_length = length, max_length
        if self.cache is not None:
            self.cache = tuple(F.pad(cached[:, :, :length], (0, 0, 0, max_length - length)) for cached in self.cache)

    def _mask(self, first: int, start: int, device: torch.device) -> Tensor:
        """Returns a mask (B or 1, 1, T, S) of the keys from `start` on: not later, in the window, and not padding."""
        query_positions = torch.arange(first, self.length, device=device)[:, None]
        key_positions = torch.arange(start, self.length, device=device)
        mask = (query_positions >= key_positions)[None, None]
        if self.window:
            mask = mask & (query_positions - key_positions < self.window)
        if self.padding is None:
            return mask
        # Padding attends to itself: a softmax over nothing is NaN, which a weight of 0 does not remove from other tokens.
        return mask & (key_positions >= self.padding[:, None, None, None]) | (query_positions == key_positions)

    def _check(self, k: Tensor, mask: Mask | None) -> None:
        if mask is not None:
            raise UserError(NO_DOCUMENTS)
        if k.shape[0] != self.batch_size or self.length > self.max_length:
            raise UserError(
                f"the KV cache holds {self.batch_size} sequences of {self.max_length} tokens, not {k.shape[0]} of {self.length}; "
                "apply a larger one"
            )


class CachedLatentAttention(CachedAttention):
    """The same with a cache of latent vectors, from which keys and values are computed: (B, 1, S, R + P), as `LatentAttention` has
    them, instead of 2 x H x E values of each token."""

    def forward(self, q: Tensor, latent: Tensor, attention: Any, mask: Mask | None = None) -> Tensor:  # type: ignore[override]
        """Returns (B, H, T, E) for queries (B, H, T, E) and the latent vectors of the new tokens (B, 1, T, R + P)."""
        (latents,) = self.append(mask, latent)
        if q.shape[2] > 1:  # of a prompt, expanded heads take fewer operations
            return self.attend(q, *attention.expand(latents[:, 0, :, : attention.rank], latents[..., attention.rank :]))
        padded = None if self.padding is None else self._mask(self.length - 1, 0, q.device)
        out: Tensor = attention.attend_absorbed(q, latents, padded)
        return out
