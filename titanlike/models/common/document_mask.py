"""The attention mask of packed documents, and of sliding windows. A model makes it once for each batch, and blocks share it.

On CUDA it is a block mask of FlexAttention, whose kernels skip the blocks of keys that no query of a block attends to. It takes
16 bytes for each pair of blocks of 128 tokens. Elsewhere it is a dense mask, with one byte for each pair of tokens.

Shapes: B sequences, T queries, S keys, H query heads, K key/value heads, E head dimension; Q and R blocks of queries and keys.
"""

from functools import cache
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from titanlike.models.common.config import hides_keys
from titanlike.utils.compat import allow_recompilations

Mask: TypeAlias = Tensor | BlockMask

ANY = 2**30  # more than any distance of two tokens
BLOCK_SIZE = 128  # tokens; FlexAttention's default, and a multiple of all its tiles


class DocumentMask(nn.Module):
    """Makes the mask of attention within documents. A module, so that context parallelism can replace it.

    Args:
        window: number of tokens, the current one included, that a token attends to; 0: all. Bidirectional attention has half of
            them before the token, and as many after it.
        always: makes a mask even where attention without one would do.
        causal: whether a token attends to itself and earlier tokens only.
        flex: whether to make block masks. Default: on CUDA.
    """

    def __init__(self, *, window: int = 0, always: bool = False, causal: bool = True, flex: bool | None = None) -> None:
        super().__init__()
        self.window, self.always, self.causal, self.flex = window, always, causal, flex

    def use_dense_masks(self) -> None:
        """Makes dense masks on every device, for attention kernels other than FlexAttention."""
        self.flex = False

    def forward(self, document_ids: Tensor | None, position_ids: Tensor | None = None) -> Mask | None:
        """Returns the mask for document ids (B, T). Without them, `position_ids` (B, T) have the number of tokens and the device;
        it is None if attention needs no mask."""
        like = position_ids if document_ids is None else document_ids
        if like is None or not self.is_needed(document_ids, like.shape[1]):
            return None
        positions = torch.arange(like.shape[1], device=like.device)
        return self.make(positions, positions, document_ids, document_ids)

    def is_needed(self, document_ids: Tensor | None, num_keys: int) -> bool:
        """Whether attention to this number of keys needs a mask."""
        return document_ids is not None or self.always or hides_keys(self.window, num_keys, causal=self.causal)

    def make(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        query_document_ids: Tensor | None,
        key_document_ids: Tensor | None,
    ) -> Mask:
        """Returns the mask for positions (T,) and (S,), and document ids (B, T) and (B, S), of queries and keys."""
        flex = query_positions.is_cuda if self.flex is None else self.flex
        make = document_block_mask if flex else document_dense_mask
        return make(query_positions, key_positions, query_document_ids, key_document_ids, self.window, self.causal)


def document_dense_mask(
    query_positions: Tensor,
    key_positions: Tensor,
    query_document_ids: Tensor | None,
    key_document_ids: Tensor | None,
    window: int = 0,
    causal: bool = True,
) -> Tensor:
    """Returns a mask (B, 1, T, S) that is True where a query (T,) may attend to a key (S,): in the same document, and, if `causal`,
    not later and among the last `window` tokens, else at most half a window away. B is 1 without document ids."""
    lowest, highest = _distances(window, causal)
    mask = query_positions[:, None] >= key_positions + lowest
    if highest < ANY:
        mask = mask & (query_positions[:, None] <= key_positions + highest)
    if query_document_ids is None or key_document_ids is None:
        return mask[None, None]
    return (query_document_ids[:, None, :, None] == key_document_ids[:, None, None, :]) & mask


def document_block_mask(
    query_positions: Tensor,
    key_positions: Tensor,
    query_document_ids: Tensor | None,
    key_document_ids: Tensor | None,
    window: int = 0,
    causal: bool = True,
) -> BlockMask:
    """Returns `document_dense_mask` as a block mask.

    Which blocks are computed follows from the smallest and largest position and document id in each block. Unlike
    `create_block_mask`, this needs no compilation to avoid the dense mask.
    """
    if query_document_ids is None or key_document_ids is None:  # one document
        query_document_ids, key_document_ids = (
            torch.zeros_like(positions)[None] for positions in (query_positions, key_positions)
        )

    lowest, highest = _distances(window, causal)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = query_document_ids[batch, query] == key_document_ids[batch, key]
        return same_document & (query_positions[query] >= key_positions[key] + lowest)

    def attends_locally(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return attends(batch, head, query, key) & (query_positions[query] <= key_positions[key] + highest)

    first_query, last_query = _block_bounds(query_positions[:, None], 0)  # (Q, 1)
    first_key, last_key = _block_bounds(key_positions, 0)  # (R,)
    low_query, high_query = _block_bounds(query_document_ids[..., None], 1)  # (B, Q, 1)
    low_key, high_key = (bound[:, None] for bound in _block_bounds(key_document_ids, 1))  # (B, 1, R)
    some = (first_key <= last_query - lowest) & (low_key <= high_query) & (low_query <= high_key)  # (B, Q, R)
    # In full blocks, every query attends to every key: no key is too late, and all are of one document.
    full = (last_key <= first_query - lowest) & (low_query == high_key) & (high_query == low_key)
    if window:
        some, full = some & (first_query - last_key <= highest), full & (last_query - first_key <= highest)
    return BlockMask.from_kv_blocks(
        *_block_indices(some & ~full),
        *_block_indices(full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=attends_locally if window else attends,
        seq_lengths=(query_positions.shape[0], key_positions.shape[0]),
    )


def block_mask_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, soft_cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Computes FlexAttention (B, H, T, E) of queries (B, H, T, E), keys and values (B, K, S, E), with soft-capped scores if
    `soft_cap` is not 0, and with attention sinks (H,). Compiles it, even if the model is not compiled: in eager mode it
    would materialize the scores of all pairs of tokens."""

    def cap_score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    attention: Any = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    score_mod = cap_score if soft_cap else None
    options: dict[str, Any] = dict(score_mod=score_mod, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    if sinks is None:
        return cast(Tensor, attention(q, k, v, **options))
    out, statistics = attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    # With the sinks in the denominators of the softmax, all probabilities have this factor.
    return cast(Tensor, out * (statistics.lse - sinks.float()[:, None]).sigmoid()[..., None].to(out.dtype))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, soft_cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Computes attention (B, H, T, E) of queries (B, H, T, E), keys and values (B, K, S, E) with a dense mask (B, 1, T, S) and,
    optionally, a sink of each head (H,): a further logit in the denominator of the softmax.

    With either option, all scores (B, H, T, S) are in memory at once: no kernel of scaled dot product attention has it.
    """
    if not soft_cap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    grouped = q.unflatten(1, (k.shape[1], -1))  # (B, K, H / K, T, E)
    scores = (grouped @ k[:, :, None].transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = soft_cap * (scores / soft_cap).tanh() if soft_cap else scores
    scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    if sinks is not None:  # as of a further key, which has no value
        logits = sinks.float().view(k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, logits), -1)
    return (scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v[:, :, None]).flatten(1, 2)


@cache
def compiled_flex_attention() -> Any:
    """Returns compiled FlexAttention. Not with dynamic shapes: a run has few shapes, and their kernels are slower."""
    allow_recompilations()  # tasks are scored at several lengths, each with up to two masks
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def _distances(window: int, causal: bool) -> tuple[int, int]:
    """Returns the smallest and the largest distance of a query from the keys before it that it attends to."""
    if causal:
        return 0, window - 1 if window else ANY
    return (-(window // 2), window // 2) if window else (-ANY, ANY)


def _block_bounds(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest element of each block of tokens along `dim`."""
    padding = x.narrow(dim, x.shape[dim] - 1, 1)
    repeats = [1] * x.dim()
    repeats[dim] = -x.shape[dim] % BLOCK_SIZE
    blocks = torch.cat((x, padding.repeat(repeats)), dim).unflatten(dim, (-1, BLOCK_SIZE))
    return blocks.amin(dim + 1), blocks.amax(dim + 1)


def _block_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each block of queries in (B, Q, R), the number of selected blocks of keys (B, 1, Q), and their indices, followed
    by the indices of the others (B, 1, Q, R)."""
    selected = blocks[:, None].int()
    indices = torch.argsort(selected, dim=-1, descending=True, stable=True)
    return selected.sum(-1, dtype=torch.int32), indices.int()
