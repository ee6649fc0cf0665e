"""Llama and the models built like it, in plain PyTorch: Qwen, Gemma and, with `moe.py`, Mixtral and DeepSeek.

Shapes: B sequences, T tokens, D model dimension, H query heads, K key/value heads, E head dimension, V vocabulary.
"""

import math
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.common.document_mask import DocumentMask, Mask
from titanlike.models.common.layers import DotProductAttention, LMHead, TiedLMHead, UnitOffsetRMSNorm
from titanlike.models.llama.config import LlamaFamilyConfig


class Llama(nn.Module):
    """A decoder of the Llama family. Modules that are None and deleted blocks are skipped, so that a pipeline stage runs."""

    first_stage_modules: ClassVar[tuple[str, ...]] = ("tok_embeddings",)
    last_stage_modules: ClassVar[tuple[str, ...]] = ("norm", "output")

    def __init__(self, config: LlamaFamilyConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        # Soft-capped scores and sinks have no causal kernel.
        always = config.attention_soft_cap > 0 or config.has_sinks
        self.document_mask = DocumentMask(always=always)
        self.local_mask = DocumentMask(window=config.sliding_window, always=always)
        # A ModuleDict, not a ModuleList: names must survive when a pipeline stage deletes the blocks of other stages.
        self.layers = nn.ModuleDict({str(i): self.build_block(i) for i in range(config.num_layers)})
        self.norm: nn.Module | None = rms_norm(config, config.dim)
        self.output: nn.Module | None = (
            TiedLMHead(self.tok_embeddings, soft_cap=config.logit_soft_cap)
            if config.tied_head
            else LMHead(config.dim, config.vocab_size, soft_cap=config.logit_soft_cap)
        )
        self.balance_loss: nn.Module | None = None  # of models with experts

    @property
    def tensor_plan(self) -> dict[str, str]:
        """The tensor-parallel style of each submodule."""
        return self.config.tensor_plan(map(int, self.layers))

    def build_block(self, index: int) -> nn.Module:
        """Returns a block of the architecture."""
        return Block(self.config, index, FeedForward(self.config, self.config.ffn_dim))

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns logits (B, T, V) for tokens (B, T), or the loss summed over the valid `labels` (B, T).

        Args:
            position_ids: positions (B, T) or (1, T). Default: 0, 1, ... in each sequence.
            document_ids: the document of each token (B, T); attention does not cross documents. Default: one document.
            counts: what the routers of previous pipeline stages have counted (B, 2, E). A stage returns it, too, with its own.
        """
        h = tokens
        if self.tok_embeddings is not None:
            h = self.tok_embeddings(tokens)  # (B, T, D)
            if self.config.embedding_scale:  # rounded to the dtype of the activations, as published models were trained
                h = h * torch.tensor(self.config.dim**0.5, dtype=h.dtype)
        h, counts = self.run_blocks(h, counts, *self.rope_and_masks(tokens, position_ids, document_ids))
        if counts is None and self.balance_loss is not None and torch.is_grad_enabled():  # a stage of dense blocks
            counts = h.new_zeros((h.shape[0], 2, self.config.num_experts), dtype=torch.float32)
        h = self.norm(h) if self.norm is not None else h
        if self.balance_loss is None or counts is None:
            return self.output(h, labels) if self.output is not None else h
        if self.output is None:
            return h, counts
        out = self.output(h, labels)
        return out if labels is None else self.balance_loss(out, counts, labels)

    def rope_and_masks(
        self, tokens: Tensor, position_ids: Tensor | None, document_ids: Tensor | None
    ) -> tuple[dict[bool, tuple[Tensor, Tensor]], dict[bool, Mask | None]]:
        """Returns the rotary angles and the mask, once for all blocks with sliding-window attention (True), and once for others."""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        kinds = {self.config.is_local(int(name)) for name in self.layers}
        rope = {local: rotary_angles(self.config, position_ids, local=local) for local in kinds}
        masks = {False: self.document_mask, True: self.local_mask}
        return rope, {local: masks[local](document_ids, position_ids) for local in kinds}

    def run_blocks(
        self, h: Tensor, counts: Tensor | None, rope: dict[bool, Any], mask: dict[bool, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output of the blocks (B, T, D), and `counts` with what their routers have counted."""
        for name, layer in self.layers.items():
            if int(name) < self.config.num_layers:  # those that follow predict later tokens
                local = self.config.is_local(int(name))
                h, counts = add_counts(layer, layer(h, rope[local], mask[local]), counts)
        return h, counts

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value."""
        if name.endswith("bias"):
            value.zero_()
            return
        if name.endswith("norm.weight"):
            value.fill_(0.0 if self.config.unit_offset_norm else 1.0)
            return
        std = 0.02
        if name.removesuffix(".weight").endswith(("attention.wo", "feed_forward.w2", "experts.w2", "shared.w2")):
            # Scale down what each block adds to the residual stream, so that its variance does not grow with depth.
            std /= math.sqrt(2 * self.config.num_layers)
        value.normal_(0.0, std, generator=generator)


def add_counts(
    layer: nn.Module, out: Tensor | tuple[Tensor, Tensor], counts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the hidden states that a block has returned and, for the balance loss, `counts` with what its router has counted."""
    if not isinstance(out, tuple):
        return out, counts
    h, of_layer = out
    cast(Any, layer).feed_forward.router.add_load(of_layer)
    if of_layer.shape[1] == 1:  # without a balance loss
        return h, counts
    return h, of_layer if counts is None else counts + of_layer


class Block(nn.Module):
    """A pre-norm transformer block: attention and feed-forward, each with a residual connection. If the config has post-norms,
    what they add to it is normalized, too."""

    def __init__(
        self, config: LlamaFamilyConfig, index: int, feed_forward: nn.Module, attention: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = rms_norm(config, config.dim)
        self.attention = attention or Attention(config, config.sliding_window if config.is_local(index) else 0)
        self.post_attention_norm = rms_norm(config, config.dim) if config.post_norms else None
        self.ffn_norm = rms_norm(config, config.dim)
        self.feed_forward = feed_forward
        self.post_ffn_norm = rms_norm(config, config.dim) if config.post_norms else None

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        out = self.attention(self.attention_norm(x), rope, mask)
        out = out if self.post_attention_norm is None else self.post_attention_norm(out)
        h = x + out
        out, counts = self.feed_forward(self.ffn_norm(h)), None
        if isinstance(out, tuple):
            out, counts = out
        out = out if self.post_ffn_norm is None else self.post_ffn_norm(out)
        h = h + out
        # FSDP prefetches where the backward pass reaches an output. After this copy, both outputs are before the experts: else it
        # would gather them again.
        return h if counts is None else (h, counts.clone() if counts.requires_grad else counts)


class Attention(nn.Module):
    """Grouped-query attention with rotary position embeddings and, if the config has them, biases and QK-norm."""

    def __init__(self, config: LlamaFamilyConfig, window: int = 0) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query_scale = config.query_scale
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.q_norm, self.k_norm = (rms_norm(config, config.head_dim) if config.qk_norm else None for _ in range(2))
        self.attend = DotProductAttention(soft_cap=config.attention_soft_cap, window=window, causal=config.causal)
        self.sinks: nn.Module | None = None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        # Take the number of heads from the projections: under tensor parallelism a rank has only some of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # (B, T, H, E)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        sinks = () if self.sinks is None else (self.sinks(),)
        h = self.attend(apply_rope(q, rope, self.query_scale), apply_rope(k, rope), v, mask, *sinks)  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)


class FeedForward(nn.Module):
    """A feed-forward layer with a gate: SwiGLU, or, if the config has it, GELU in the tanh approximation."""

    def __init__(self, config: LlamaFamilyConfig, hidden: int) -> None:
        super().__init__()
        self.gelu = config.gelu
        self.w1 = nn.Linear(config.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        return self.w2((F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * self.w3(x))


def rms_norm(config: LlamaFamilyConfig, size: int) -> nn.RMSNorm:
    """Returns the norm of an architecture."""
    return (UnitOffsetRMSNorm if config.unit_offset_norm else nn.RMSNorm)(size, eps=config.norm_eps)


def rotary_angles(config: LlamaFamilyConfig, position_ids: Tensor, *, local: bool = False) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine (B, 1, T, E) of the rotary angles at `positions` (B, T), in float32. Those of blocks with
    sliding-window attention (`local`) may have a base of their own, and no scaling.

    They are computed in each forward pass: a buffer would have to be sharded, saved and cast correctly.
    """
    size = config.rotary_dim
    exponents = torch.arange(0, size, 2, device=position_ids.device, dtype=torch.float32) / size
    # Not theta**-exponents, whose last bit differs from that of published models: 5e-3 in a cosine at position 131,071.
    theta = config.rope_local_theta if local and config.rope_local_theta else config.rope_theta
    frequencies = 1.0 / theta**exponents  # (E/2,)
    if config.rope_scaling != 1.0 and not (local and config.rope_local_theta):
        from titanlike.models.common.rope_scaling import scaled_frequencies

        frequencies = scaled_frequencies(frequencies, theta, config)
    angles = position_ids.float()[:, None, :, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)  # (B, 1, T, E): both halves of a head rotate by the same angles
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
    """Rotates each pair of channels (first half, second half of a head) by its position's angle, and multiplies them by `scale`,
    in float32."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    out = x.float() * cos + rotated * sin
    return (out if scale == 1.0 else out * scale).to(x.dtype)
