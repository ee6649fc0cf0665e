"""Context parallelism: a group of ranks shares each sequence, and each of them looks at the keys and values of all.

A causal token looks back only, so a sequence cut into equal parts would give the last rank most of the work. Here it is cut
into twice as many pieces as there are ranks, and each rank has one from the front and its mirror image from the back.

Shapes: B sequences, T tokens of this rank, S tokens seen, H query heads, K key and value heads, E width of a head.
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
    """Which places of a sequence this rank holds, in the order in which it holds them."""
    if mesh.size() == 1:
        return torch.arange(seq_len)
    pieces = torch.arange(seq_len).chunk(2 * mesh.size())
    rank = mesh.get_local_rank()
    return torch.cat((pieces[rank], pieces[-1 - rank]))


def gather_sequence(mine: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """The whole sequence, in its own order, from every rank's share of it."""
    if mesh.size() == 1:
        return mine
    pieces = all_gather(mine, dim, mesh.get_group()).chunk(2 * mesh.size(), dim)
    return torch.cat((*pieces[0::2], *reversed(pieces[1::2])), dim)


def apply_context(blocks: nn.ModuleDict, mesh: DeviceMesh) -> None:
    """Let the attention of each block look at the whole sequence, of which it is given this rank's pieces."""
    if mesh.size() == 1:
        return
    forward = partial(attend_over, mesh=mesh)  # one for all, so that one compiled block serves all
    for block in blocks.values():
        attend: Any = block.get_submodule("attention.attend")
        attend.forward = forward


def attend_over(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None, *, mesh: DeviceMesh) -> Tensor:
    """Attention of this rank's queries (B, H, T, E) to the keys and values (B, K, T, E) of all ranks, gathered before they
    are repeated for the heads of a group: no more is moved than there is."""
    keys, values = gather_sequence(k, 2, mesh), gather_sequence(v, 2, mesh)
    all_document_ids = None if document_ids is None else gather_sequence(document_ids, 1, mesh)
    length = q.shape[2] // 2
    attended = []
    for half, piece in enumerate((mesh.get_local_rank(), 2 * mesh.size() - 1 - mesh.get_local_rank())):
        mine = slice(half * length, (half + 1) * length)
        seen = slice((piece + 1) * length)  # nothing behind this piece is visible from it
        whose = None
        if document_ids is not None and all_document_ids is not None:
            whose = document_ids[:, mine], all_document_ids[:, seen]
        attended.append(attend_to_prefix(q[:, :, mine], keys[:, :, seen], values[:, :, seen], whose))
    return torch.cat(attended, dim=2)


def attend_to_prefix(q: Tensor, k: Tensor, v: Tensor, document_ids: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Causal attention of queries (B, H, T, E) that belong to the last T of the keys and values (B, K, S, E)."""
    if document_ids is None and q.is_cuda and q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        # To this kernel causal means just that, and it needs no mask. (By way of F.scaled_dot_product_attention it would mean
        # that the queries belong to the first keys.)
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return out
    places = torch.arange(k.shape[2], device=q.device)
    seeing = places[-q.shape[2] :]
    mask = seeing[:, None] >= places if document_ids is None else document_causal_mask(seeing, places, *document_ids)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
