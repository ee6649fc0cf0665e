"""Context parallelism: shards each sequence over a group of ranks, and all-gathers keys and values for attention.

With a causal mask, contiguous shards would give the last rank most of the attention work. The sequence is therefore split into
twice as many chunks as there are ranks, and rank i holds chunks i and -1 - i (zig-zag load balancing).

Shape legend: B batch, T local tokens, S key positions, H query heads, K key/value heads, E head dimension.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config import UserError
from titanlike.distributed.autograd_collectives import all_gather
from titanlike.models.common.document_mask import DocumentMask, Mask, masked_attention
from titanlike.models.common.layers import DotProductAttention
from titanlike.parallelisms.blocks import Blocks, list_blocks
from titanlike.utils import compat
from titanlike.utils.modules import replace_modules


def context_position_ids(seq_len: int, mesh: DeviceMesh, device: torch.device | None = None) -> Tensor:
    """Returns the position ids of this rank's tokens, in the order in which the rank holds them."""
    if mesh.size() == 1:
        return torch.arange(seq_len, device=device)
    if seq_len % (2 * mesh.size()):
        raise UserError(
            f"context parallelism over {mesh.size()} ranks splits a sequence into {2 * mesh.size()} chunks, which do not divide "
            f"its {seq_len} tokens; pad the sequence"
        )
    chunks = torch.arange(seq_len, device=device).chunk(2 * mesh.size())
    rank = mesh.get_local_rank()
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def gather_sequence(local: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """All-gathers a sequence along `dim` and restores its original order."""
    if mesh.size() == 1:
        return local
    chunks = all_gather(local, dim, mesh.get_group()).chunk(2 * mesh.size(), dim)
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])), dim)


def apply_context(
    blocks: Blocks,
    mesh: DeviceMesh,
    *,
    attention: str = "attention.attend",
    model: nn.Module | None = None,
) -> None:
    """Replaces the attention of each block by attention over the gathered keys and values.

    Args:
        attention: name, in each block, of the submodule that is called with queries (B, H, T, E), keys and values (B, K, T, E) and,
            optionally, a mask, as `DotProductAttention` is. Each rank passes the tokens at `context_position_ids` to
            the model.
        model: what has the blocks. Its `DocumentMask`s, which make that mask, are replaced by `ContextParallelMask`s, and its
            `balance_loss` sums over a sequence.
    """
    if mesh.size() == 1:
        return
    for block in list_blocks(blocks):
        parent, _, name = attention.rpartition(".")
        try:
            attend = block.get_submodule(attention)
        except AttributeError:
            raise UserError(
                f"context parallelism replaces the submodule {attention}, which {type(block).__name__} does not have; pass its "
                "name as attention=, or the blocks that have it"
            ) from None
        defaults = {"soft_cap": 0.0, "window": 0, "causal": True}
        options: Any = {option: getattr(attend, option, default) for option, default in defaults.items()}
        setattr(block.get_submodule(parent), name, ContextParallelAttention(mesh, **options))  # <- replaces attention
    masks: dict[nn.Module, nn.Module] = {}
    for module in () if model is None else model.modules():
        if isinstance(module, DocumentMask):
            masks[module] = ContextParallelMask(
                mesh, window=module.window, always=module.always, causal=module.causal, flex=module.flex
            )
    if model is not None:
        replace_modules(model, masks)
    balance_loss = getattr(model, "balance_loss", None)
    if balance_loss is not None:
        balance_loss.sum_over_sequence = partial(_sum, group=mesh.get_group())


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    return compat.wait_tensor(compat.all_reduce(values, "sum", group))


class ContextParallelAttention(DotProductAttention):
    """Attention of local queries over the keys and values of all ranks."""

    def __init__(self, mesh: DeviceMesh, *, soft_cap: float = 0.0, window: int = 0, causal: bool = True) -> None:
        super().__init__(soft_cap=soft_cap, window=window, causal=causal)
        self.mesh = mesh

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, sinks: Tensor | None = None) -> Tensor:
        """Returns (B, H, T, E) for local queries (B, H, T, E), the keys and values (B, K, T, E) of all ranks, and the sinks (H,) of
        these heads, which require a mask.

        Keys and values are gathered before they are repeated for grouped query heads, which minimizes the bytes sent.
        """
        keys, values = gather_sequence(k, 2, self.mesh), gather_sequence(v, 2, self.mesh)
        if mask is not None and mask.shape[-1] != keys.shape[2]:
            raise UserError(
                f"the mask is for {mask.shape[-1]} keys, but context parallelism gathers {keys.shape[2]}; pass the model "
                "that makes the mask as model= of apply_context"
            )
        if not self.causal or (mask is not None and not isinstance(mask, Tensor)):
            return super().forward(q, keys, values, mask, sinks)
        length, rank = q.shape[2] // 2, self.mesh.get_local_rank()
        outputs = []
        for half, chunk in enumerate((rank, 2 * self.mesh.size() - 1 - rank)):
            queries = slice(half * length, (half + 1) * length)
            prefix = slice((chunk + 1) * length)  # later keys are masked for every query of this chunk
            chunk_mask = None if mask is None else mask[:, :, queries, prefix]
            part = q[:, :, queries], keys[:, :, prefix], values[:, :, prefix]
            outputs.append(prefix_attention(*part, chunk_mask, self.soft_cap, sinks))
        return torch.cat(outputs, dim=2)

    def all_keys(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys of all ranks for local keys (B, K, T, E), and the positions of local queries (T,)."""
        positions = context_position_ids(k.shape[2] * self.mesh.size(), self.mesh, k.device)
        return gather_sequence(k, 2, self.mesh), positions


class ContextParallelMask(DocumentMask):
    """Makes the mask of local queries over the keys of all ranks."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(**options)
        self.mesh = mesh

    def forward(self, document_ids: Tensor | None, position_ids: Tensor | None = None) -> Mask | None:
        """Returns the mask for local document ids (B, T) or, without them, for as many tokens as `position_ids` (B, T) has."""
        like = position_ids if document_ids is None else document_ids
        num_keys = 0 if like is None else like.shape[1] * self.mesh.size()
        if like is None or not self.is_needed(document_ids, num_keys):
            return None
        gathered = None if document_ids is None else gather_sequence(document_ids, 1, self.mesh)  # (B, S)
        positions = context_position_ids(num_keys, self.mesh, like.device)
        return self.make(positions, torch.arange(num_keys, device=like.device), document_ids, gathered)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, soft_cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Computes causal attention of queries (B, H, T, E) at the last T positions of the keys and values (B, K, S, E), or attention
    with a mask (B, 1, T, S)."""
    if mask is not None:
        return masked_attention(q, k, v, mask, soft_cap, sinks)
    if q.is_cuda and q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        padding = q.shape[-1] - v.shape[-1]  # the kernel takes heads of one size
        out = compat.flash_attention_of_last_queries(q, k, F.pad(v, (0, padding)) if padding else v)
        return out[..., : v.shape[-1]]
    keys = torch.arange(k.shape[2], device=q.device)
    mask = keys[-q.shape[2] :, None] >= keys
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
