"""The attention mask of packed documents. A model makes it once for each batch, and all blocks share it.

On CUDA it is a block mask of FlexAttention, whose kernels skip the blocks of keys that no query of a block attends to. It takes
16 bytes for each pair of blocks of 128 tokens. Elsewhere it is a dense mask, with one byte for each pair of tokens.

Shapes: B sequences, T queries, S keys, H query heads, K key/value heads, E head dimension; Q and R blocks of queries and keys.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # imported where it is used: it imports the compiler, which takes a second
    from torch.nn.attention.flex_attention import BlockMask

Mask: TypeAlias = Union[Tensor, "BlockMask"]

BLOCK_SIZE = 128  # tokens; FlexAttention's default, and a multiple of all its tiles


class DocumentMask(nn.Module):
    """Makes the mask of causal attention within documents. A module, so that context parallelism can replace its `forward`."""

    flex: bool | None = None
    """Whether to make block masks. Default: for document ids on CUDA."""

    def forward(self, document_ids: Tensor | None) -> Mask | None:
        """Returns the mask for document ids (B, T), or None without them."""
        if document_ids is None:
            return None
        positions = torch.arange(document_ids.shape[1], device=document_ids.device)
        return self.make(positions, positions, document_ids, document_ids)

    def make(
        self, query_positions: Tensor, key_positions: Tensor, query_document_ids: Tensor, key_document_ids: Tensor
    ) -> Mask:
        """Returns the mask for positions (T,) and (S,), and document ids (B, T) and (B, S), of queries and keys."""
        flex = query_document_ids.is_cuda if self.flex is None else self.flex
        make = document_block_mask if flex else document_causal_mask
        return make(query_positions, key_positions, query_document_ids, key_document_ids)


def document_causal_mask(
    query_positions: Tensor, key_positions: Tensor, query_document_ids: Tensor, key_document_ids: Tensor
) -> Tensor:
    """Returns a mask (B, 1, T, S) that is True where a query (T,) may attend to a key (S,): not later, in the same document."""
    same_document = query_document_ids[:, None, :, None] == key_document_ids[:, None, None, :]
    return same_document & (query_positions[:, None] >= key_positions[None, :])


def document_block_mask(
    query_positions: Tensor, key_positions: Tensor, query_document_ids: Tensor, key_document_ids: Tensor
) -> "BlockMask":
    """Returns `document_causal_mask` as a block mask.

    Which blocks are computed follows from the smallest and largest position and document id in each block. Unlike
    `create_block_mask`, this needs no compilation to avoid the dense mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = query_document_ids[batch, query] == key_document_ids[batch, key]
        return same_document & (query_positions[query] >= key_positions[key])

    first_query, last_query = _block_bounds(query_positions[:, None], 0)  # (Q, 1)
    first_key, last_key = _block_bounds(key_positions, 0)  # (R,)
    low_query, high_query = _block_bounds(query_document_ids[..., None], 1)  # (B, Q, 1)
    low_key, high_key = (bound[:, None] for bound in _block_bounds(key_document_ids, 1))  # (B, 1, R)
    some = (first_key <= last_query) & (low_key <= high_query) & (low_query <= high_key)  # (B, Q, R)
    # In full blocks, every query attends to every key: no key is later, and all are of one document.
    full = (last_key <= first_query) & (low_query == high_key) & (high_query == low_key)
    return BlockMask.from_kv_blocks(
        *_block_indices(some & ~full),
        *_block_indices(full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=attends,
        seq_lengths=(query_positions.shape[0], key_positions.shape[0]),
    )


def block_mask_attention(q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask") -> Tensor:
    """Computes FlexAttention (B, H, T, E) of queries (B, H, T, E), keys and values (B, K, S, E). Compiles it, even if the model
    is not compiled: in eager mode it would materialize the scores of all pairs of tokens."""
    attention = flex_attention() if torch.compiler.is_compiling() else compiled_flex_attention()
    out: Tensor = attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


def flex_attention() -> Any:
    """Returns FlexAttention, which compiled code traces as a part of its graph."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def compiled_flex_attention() -> Any:
    """Returns compiled FlexAttention. Not with dynamic shapes: a run has few shapes, and their kernels are slower."""
    return torch.compile(flex_attention(), fullgraph=True, dynamic=False)


def _block_bounds(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest element of each block of tokens along `dim`."""
    padding = x.narrow(dim, x.shape[dim] - 1, 1)
    repeats = [1] * x.dim()
    repeats[dim] = -x.shape[dim] % BLOCK_SIZE
    blocks = torch.cat((x, padding.repeat(repeats)), dim).unflatten(dim, (-1, BLOCK_SIZE))
    return blocks.amin(dim + 1), blocks.amax(dim + 1)


def _block_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each block of queries in (B, Q, R), the number of selected blocks of keys (B, 1, Q), and their indices, followed
    by those of the others (B, 1, Q, R)."""
    selected = blocks[:, None].int()
    indices = torch.argsort(selected, dim=-1, descending=True, stable=True)
    return selected.sum(-1, dtype=torch.int32), indices.int()
