"""Context parallelism: shards each sequence over a group of ranks, and all-gathers keys and values for attention.

With a causal mask, contiguous shards would give the last rank most of the attention work. The sequence is therefore split into
twice as many chunks as there are ranks, and rank i holds chunks i and -1 - i (zig-zag load balancing).

Shape legend: B batch, T local tokens, S key positions, H query heads, K key/value heads, E head dimension.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.distributed.collectives import all_gather
from titanlike.models.layers import document_causal_mask


def context_position_ids(seq_len: int, mesh: DeviceMesh) -> Tensor:
    """Returns the position ids of this rank's tokens, in the order in which the rank holds them."""
    if mesh.size() == 1:
        return torch.arange(seq_len)
    chunks = torch.arange(seq_len).chunk(2 * mesh.size())
    rank = mesh.get_local_rank()
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def gather_sequence(local: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """All-gathers a sequence along `dim` and restores its original order."""
    if mesh.size() == 1:
        return local
    chunks = all_gather(local, dim, mesh.get_group()).chunk(2 * mesh.size(), dim)
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])), dim)


def apply_context(blocks: nn.ModuleDict, mesh: DeviceMesh) -> None:
    """Replaces the attention of each block by attention over the gathered keys and values."""
    if mesh.size() == 1:
        return
    forward = partial(context_parallel_attention, mesh=mesh)  # one object: all blocks share one compiled forward
    for block in blocks.values():
        attend: Any = block.get_submodule("attention.attend")
        attend.forward = forward


def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None, *, mesh: DeviceMesh
) -> Tensor:
    """Computes causal attention of local queries (B, H, T, E) over the keys and values (B, K, T, E) of all ranks.

    Keys and values are gathered before they are repeated for grouped query heads, which minimizes the bytes sent.
    """
    keys, values = gather_sequence(k, 2, mesh), gather_sequence(v, 2, mesh)
    ids = None if document_ids is None else (document_ids, gather_sequence(document_ids, 1, mesh))
    length, rank = q.shape[2] // 2, mesh.get_local_rank()
    outputs = []
    for half, chunk in enumerate((rank, 2 * mesh.size() - 1 - rank)):
        queries = slice(half * length, (half + 1) * length)
        prefix = slice((chunk + 1) * length)  # later keys are masked for every query of this chunk
        documents = None if ids is None else (ids[0][:, queries], ids[1][:, prefix])
        outputs.append(prefix_attention(q[:, :, queries], keys[:, :, prefix], values[:, :, prefix], documents))
    return torch.cat(outputs, dim=2)


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, document_ids: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Computes causal attention of queries (B, H, T, E) at the last T positions of the keys and values (B, K, S, E)."""
    if document_ids is None and q.is_cuda and q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        # This kernel aligns a causal mask to the last keys and needs no mask tensor. F.scaled_dot_product_attention with
        # is_causal=True aligns it to the first keys.
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return out
    keys = torch.arange(k.shape[2], device=q.device)
    queries = keys[-q.shape[2] :]
    mask = queries[:, None] >= keys if document_ids is None else document_causal_mask(queries, keys, *document_ids)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
