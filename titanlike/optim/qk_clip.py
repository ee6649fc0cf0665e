"""QK-clip: scales the weights of queries and keys of heads whose largest attention logit of a step exceeds a threshold.

As in MuonClip of Kimi K2: after the step of the optimizer, with the factor g = threshold / largest logit of a head, the matrices of
its queries and keys are multiplied by sqrt(g) each. With multi-head latent attention, the key that RoPE rotates is the same for all
heads: it is not scaled, and the rotated channels of queries are multiplied by g. With grouped-query attention, keys are multiplied
by the square root of the smallest g of their group, and the queries of each head by the rest.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.checkpoint.staging import shard_range_of
from titanlike.models.common.attention_logits import record_logits
from titanlike.models.common.layers import DotProductAttention
from titanlike.utils.dtensor import local_tensor


class QKClip:
    """Clips the attention logits of a model. All ranks create it together, before the first forward pass.

    Args:
        threshold: largest logit that leaves a head as it is.
    """

    def __init__(self, model: nn.Module, threshold: float) -> None:
        self.threshold = threshold
        self.max_logit = torch.zeros(())
        self.attentions: list[Any] = [
            module for module in model.modules() if isinstance(module._modules.get("attend"), DotProductAttention)
        ]
        self.maxima: list[Tensor] = []
        for attention in self.attentions:
            weight = queries_of(attention).weight
            names = getattr(getattr(weight, "device_mesh", None), "mesh_dim_names", None) or ()
            self.num_tensor = weight.device_mesh["tensor"].size() if "tensor" in names else 1
            num_heads = weight.shape[0] // attention.head_dim // self.num_tensor
            self.maxima.append(record_logits(attention.attend, num_heads, local_tensor(weight).device))

    @torch.no_grad()
    def step(self) -> None:
        """Scales the weights by the largest logits since the last `reset`, which it reduces over all ranks with these weights."""
        if not self.maxima:  # a pipeline stage without blocks
            return
        local = torch.stack(self.maxima)  # (layers, H of this rank)
        weight = queries_of(self.attentions[0]).weight
        mesh: Any = getattr(weight, "device_mesh", None)
        rank = mesh["tensor"].get_local_rank() if self.num_tensor > 1 else 0
        maxima = local.new_full((len(local), local.shape[1] * self.num_tensor), -torch.inf)
        maxima[:, rank * local.shape[1] : (rank + 1) * local.shape[1]] = local
        for dimension in range(0 if mesh is None else mesh.ndim):
            if mesh.size(dimension) > 1:
                dist.all_reduce(maxima, dist.ReduceOp.MAX, mesh.get_group(dimension))
        self.max_logit = maxima.max()
        factors = torch.where(maxima > self.threshold, self.threshold / maxima, 1.0)
        for attention, factor in zip(self.attentions, factors, strict=True):
            scale_heads(attention, factor)

    def reset(self) -> None:
        """Forgets the logits."""
        for maxima in self.maxima:
            maxima.fill_(-torch.inf)


def queries_of(attention: Any) -> Any:
    """Returns the layer that computes the queries."""
    return attention._modules.get("wq") or attention.wq_b


def scale_heads(attention: Any, factor: Tensor) -> None:
    """Multiplies the attention logits of each head by its factor (H,), by the weights of queries and keys."""
    if "wkv_b" in attention._modules:
        root = factor.sqrt()[:, None]
        nope = root.expand(-1, attention.nope_dim)
        query_scale = torch.cat((nope, factor[:, None].expand(-1, attention.rope_dim)), dim=1)
        key_scale = torch.cat((nope, torch.ones_like(root).expand(-1, attention.v_dim)), dim=1)
        scale_rows(queries_of(attention), query_scale.flatten())
        scale_rows(attention.wkv_b, key_scale.flatten())
        return
    num_groups = attention.wk.weight.shape[0] // attention.head_dim
    grouped = factor.unflatten(0, (num_groups, -1))  # (K, H / K)
    group_scale = grouped.amin(1).sqrt()
    scale_rows(attention.wk, group_scale.repeat_interleave(attention.head_dim))
    scale_rows(attention.wq, (grouped / group_scale[:, None]).flatten().repeat_interleave(attention.head_dim))


def scale_rows(linear: Any, factor: Tensor) -> None:
    """Multiplies the rows of a weight, and the elements of a bias, of which this rank has a shard, by a factor (rows,)."""
    for parameter in linear._parameters.values():
        if parameter is not None:
            shard = shard_range_of(parameter)
            rows = factor[shard.offset[0] : shard.offset[0] + shard.shape[0]]
            local_tensor(parameter).mul_(rows.view(-1, *[1] * (parameter.dim() - 1)))
