"""Mistral: Llama with a head dimension of its own and, in its first version, sliding-window attention. Does not import torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from titanlike.config.base import NonNegative, Positive, section
from titanlike.models.llama.config import LlamaFamilyConfig

# The fields of each published size that differ from the defaults below. All have heads of 128.
MISTRAL_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "7B-v0.1": dict(dim=4096, num_layers=32, ffn_dim=14336, vocab_size=32000, rope_theta=10000.0, sliding_window=4096),
    "7B-v0.3": dict(dim=4096, num_layers=32, ffn_dim=14336, vocab_size=32768),
    "Nemo-12B": dict(dim=5120, num_layers=40, ffn_dim=14336, vocab_size=131072, max_seq_len=131072),
    "Small-24B": dict(dim=5120, num_layers=40, ffn_dim=32768, vocab_size=131072, rope_theta=100000000.0),
}
for _size in list(MISTRAL_SIZES)[1:]:
    MISTRAL_SIZES[_size] |= dict(num_heads=32, num_kv_heads=8, head_dim=128)


@section
class MistralConfig(LlamaFamilyConfig):
    """Mistral: Llama with a head dimension of its own and, in its first version, sliding-window attention in all blocks."""

    name: Literal["mistral"] = "mistral"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "7B-v0.1", "7B-v0.3", "Nemo-12B", "Small-24B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    head_dim: Positive = 64
    """Dimension of an attention head, independent of `dim` and `num_heads`. The published sizes have 128."""
    sliding_window: NonNegative = 0
    """Number of tokens, the current one included, that a token attends to. 0: all before it. On GPUs, attention with a window is
    FlexAttention if `training.attention` is `auto`."""

    defaults: ClassVar = {"max_seq_len": 32768}
    norm_eps = 1e-5
    own_head_dim = 128
    hf_architecture = "MistralForCausalLM"
    hf_model_type = "mistral"
    sizes = MISTRAL_SIZES

    def is_local(self, index: int) -> bool:
        return self.sliding_window > 0

    def to_hugging_face(self) -> dict[str, Any]:
        return super().to_hugging_face() | {"sliding_window": self.sliding_window or None}

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        # Folders without a head dimension: the heads share the width of the model, as in transformers.
        values = {
            **values,
            "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        }
        window = values.get("sliding_window", 4096) or 0
        return super().fields_from_hugging_face(values) | {"sliding_window": window}
