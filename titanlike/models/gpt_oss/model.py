"""GPT-OSS in plain PyTorch: the decoder of Mixtral with attention sinks and, in every second block, sliding-window attention.

Shapes: T tokens, D model dimension, H heads.
"""

import torch
from torch import Tensor, nn

from titanlike.models.common.document_mask import DocumentMask, Mask
from titanlike.models.common.layers import DotProductAttention
from titanlike.models.common.rope import apply_rope
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.llama.model import Attention
from titanlike.models.moe.model import MoeLlama


class GptOss(MoeLlama):
    """A decoder of the GPT-OSS family."""

    config: GptOssConfig

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config)
        self.document_mask = DocumentMask(always=True)  # sinks have no causal kernel
        self.local_mask = DocumentMask(window=config.sliding_window, always=True)

    def build_attention(self, index: int) -> nn.Module:
        """Returns attention with sinks."""
        return SinkAttention(self.config, self.config.sliding_window if self.config.is_local(index) else 0)

    @torch.no_grad()
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value."""
        if name.endswith("sinks.weight"):
            value.normal_(0.0, 0.02, generator=generator)
        else:
            super().init_parameter(name, value, generator)


class SinkAttention(Attention):
    """Attention with sinks, and with biases of all projections."""

    def __init__(self, config: GptOssConfig, window: int) -> None:
        super().__init__(config, bias=True)
        self.query_scale = config.query_scale
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim)
        self.attend = DotProductAttention(window=window)
        self.sinks = Sinks(config.num_heads)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        q, k, v = self.heads(x)
        heads = (each.transpose(1, 2) for each in (apply_rope(q, rope, self.query_scale), apply_rope(k, rope), v))
        h = self.attend(*heads, mask, self.sinks())  # (B, H, T, E)
        return self.wo(h.transpose(1, 2).flatten(-2))  # (B, T, D)


class Sinks(nn.Module):
    """A logit of each head, to which a token can attend in place of other tokens. It has no value: its probability is lost."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Returns the logits of this rank's heads (H,)."""
        return self.weight
