"""DeepSeek-V2 and V3: the blocks of Llama with multi-head latent attention and, but for the first ones, with experts.

Shapes: B sequences, T tokens, S tokens in the KV cache, D model dimension, H heads, E head dimension of queries and keys, V of
values, R dimension of the latent vector, P number of the channels that RoPE rotates.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.common.document_mask import Mask
from titanlike.models.common.layers import DotProductAttention
from titanlike.models.common.rope import apply_rope
from titanlike.models.deepseek.config import DeepseekConfig, DeepseekV3Config
from titanlike.models.deepseek.multi_token import MultiTokenBlock, multi_token_loss
from titanlike.models.llama.model import Block, FeedForward
from titanlike.models.moe.model import MixtureBlock, MoeLlama, build_feed_forward
from titanlike.utils.modules import without_owner

LATENT_EPS = 1e-6


class Deepseek(MoeLlama):
    """A decoder of the DeepSeek family."""

    config: DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for index in range(config.num_layers, config.num_layers + config.num_mtp_layers):
            self.layers[str(index)] = self.build_block(index)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        counts: Tensor | None = None,
        next_tokens: Tensor | None = None,
        next_labels: Tensor | None = None,
    ) -> Any:
        """Returns what `Llama` returns. In training with labels, `next_tokens` and `next_labels` (B, T, N) add the gradient of the
        losses of further tokens."""
        if labels is None or next_tokens is None or next_labels is None or not torch.is_grad_enabled():
            return super().forward(tokens, position_ids, document_ids, labels, counts)
        return multi_token_loss(self, tokens, labels, next_tokens, next_labels, position_ids, document_ids)

    def build_block(self, index: int) -> nn.Module:
        """Returns a block with experts or, among the first, one without."""
        config, attention = self.config, LatentAttention(self.config)
        if index >= config.num_layers:
            assert isinstance(config, DeepseekV3Config)
            return MultiTokenBlock(config, attention, build_feed_forward(config))
        if index < config.num_dense_layers:
            return Block(config, attention, FeedForward(config, config.dense_ffn_dim))
        return MixtureBlock(config, attention, build_feed_forward(config))


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values of all heads are computed from one latent vector of each token, but for the
    channels of keys that RoPE rotates, which all heads share."""

    latent_cache: nn.Module | None
    """The KV cache, which holds latent vectors."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.query_scale = config.query_scale
        self.nope_dim, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.head_dim, self.rank = config.head_dim, config.kv_lora_rank
        queries, expanded = config.num_heads * self.head_dim, config.num_heads * (self.nope_dim + self.v_dim)
        rank = config.q_lora_rank
        self.wq = None if rank else nn.Linear(config.dim, queries, bias=False)
        self.wq_a = nn.Linear(config.dim, rank, bias=False) if rank else None
        self.q_norm = nn.RMSNorm(rank, eps=LATENT_EPS) if rank else None
        self.wq_b = nn.Linear(rank, queries, bias=False) if rank else None
        self.wkv_a = nn.Linear(config.dim, self.rank + self.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(self.rank, eps=LATENT_EPS)
        self.wkv_b = nn.Linear(self.rank, expanded, bias=False)
        self.wo = nn.Linear(config.num_heads * self.v_dim, config.dim, bias=False)
        self.attend = DotProductAttention()
        self.register_module("latent_cache", None)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        q = self.queries(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, E)
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)
        q_nope = q_nope if self.query_scale == 1.0 else q_nope * self.query_scale
        q = torch.cat((q_nope, apply_rope(halves(q_rope), rope, self.query_scale)), dim=-1).transpose(1, 2)
        latent, k_rope = self.wkv_a(x).split((self.rank, self.rope_dim), dim=-1)  # (B, T, R), (B, T, P)
        latent, k_rope = self.kv_norm(latent), apply_rope(halves(k_rope[:, :, None]), rope).transpose(1, 2)
        if self.latent_cache is None:
            k, v = self.expand(latent, k_rope)
            h = self.attend(q, k, v, mask)  # (B, H, T, V)
        else:
            h = self.latent_cache(q, torch.cat((latent[:, None], k_rope), dim=-1), self, mask)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)

    def queries(self, x: Tensor) -> Tensor:
        """Returns the queries of this rank's heads (B, T, H * E)."""
        if self.wq_a is None or self.q_norm is None or self.wq_b is None:
            assert self.wq is not None
            return self.wq(x)
        return self.wq_b(self.q_norm(self.wq_a(x)))

    def expand(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys (B, H, T, E) and values (B, H, T, V) of this rank's heads, from the latent vectors (B, T, R) and the
        keys that are rotated (B, 1, T, P)."""
        expanded = self.wkv_b(latent).unflatten(-1, (-1, self.nope_dim + self.v_dim)).transpose(1, 2)
        k_nope, v = expanded.split((self.nope_dim, self.v_dim), dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1), v

    def attend_absorbed(self, q: Tensor, latents: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the attention (B, H, 1, V) of the queries of one token (B, H, 1, E) over latent vectors, each with the key that
        is rotated (B, 1, S, R + P), without the keys and values of all heads: the weights that expand them are applied to queries
        and outputs instead. `mask` is (B, 1, 1, S)."""
        weight: Tensor = without_owner(self.wkv_b).weight  # type: ignore[assignment]
        key_weight, value_weight = weight.unflatten(0, (-1, self.nope_dim + self.v_dim)).split(
            (self.nope_dim, self.v_dim), dim=1
        )
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)
        q = torch.cat((q_nope @ key_weight, q_rope), dim=-1).transpose(1, 2)  # (B, 1, H, R + P): queries of one head
        scale = self.head_dim**-0.5
        h = F.scaled_dot_product_attention(q, latents, latents[..., : self.rank], attn_mask=mask, scale=scale)
        return h.transpose(1, 2) @ value_weight.transpose(-1, -2)


def halves(x: Tensor) -> Tensor:
    """Returns channels (..., P) whose pairs for RoPE are neighbours in an order in which they are in the two halves. Scores do not
    depend on the order of channels."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
