"""OLMo-2: the blocks of Llama with norms of what attention and feed-forward return, and of all queries and keys of a token.

Does not import torch.
"""

from typing import Any, ClassVar, Literal

from titanlike.config.base import section
from titanlike.models.common.config import ParameterSpec
from titanlike.models.llama.config import LAYER, LlamaFamilyConfig

# The fields of each published size that differ from the defaults below.
OLMO2_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "1B": dict(dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, ffn_dim=8192),
    "7B": dict(dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11008),
    "13B": dict(dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, ffn_dim=13824),
    "32B": dict(dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, ffn_dim=27648),
}
for _size in list(OLMO2_SIZES)[1:]:
    OLMO2_SIZES[_size] |= dict(vocab_size=100352)


@section
class Olmo2Config(LlamaFamilyConfig):
    """OLMo-2: Llama with norms after attention and feed-forward, not before them, and QK-norm over all heads of a token."""

    name: Literal["olmo2"] = "olmo2"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "1B", "7B", "13B", "32B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""

    defaults: ClassVar = {"rope_theta": 500000.0, "max_seq_len": 4096}
    hf_architecture = "Olmo2ForCausalLM"
    hf_model_type = "olmo2"
    hf_fixed: ClassVar = {"attention_bias": False}
    hf_unused: ClassVar = {"pad_token_id": None}  # by default, 1
    sizes = OLMO2_SIZES

    def block_parameters(self) -> dict[str, ParameterSpec]:
        return super().block_parameters() | {
            "attention_norm.weight": self.norm("post_attention_layernorm"),
            "ffn_norm.weight": self.norm("post_feedforward_layernorm"),
        }

    def attention_parameters(self) -> dict[str, ParameterSpec]:
        norms = {
            f"attention.{name}_norm.weight": ParameterSpec(
                (number * self.head_dim,), "colwise_norm", f"{LAYER}.self_attn.{name}_norm.weight"
            )
            for name, number in (("q", self.num_heads), ("k", self.num_kv_heads))
        }
        return super().attention_parameters() | norms
