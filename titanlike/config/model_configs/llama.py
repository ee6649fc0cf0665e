"""Config of Llama models: fields, published sizes, parameter counts, Hugging Face's config. Does not import torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from titanlike.config.base import Positive, PositiveFloat, section
from titanlike.config.model_configs.llama_family import LlamaFamilyConfig
from titanlike.config.model_configs.transformer import require

# The fields of each published size that differ from the defaults below.
LLAMA_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "3-8B": dict(
        dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=128256, max_seq_len=8192
    ),
    "3-70B": dict(
        dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28672, vocab_size=128256, max_seq_len=8192
    ),
}
LLAMA_SIZES["3.1-8B"] = LLAMA_SIZES["3-8B"] | dict(max_seq_len=131072, rope_scaling=8.0)
LLAMA_SIZES["3.1-70B"] = LLAMA_SIZES["3-70B"] | dict(max_seq_len=131072, rope_scaling=8.0)
LLAMA_SIZES["3.1-405B"] = LLAMA_SIZES["3.1-70B"] | dict(dim=16384, num_layers=126, num_heads=128, ffn_dim=53248)
LLAMA_SIZES["3.2-1B"] = LLAMA_SIZES["3.1-8B"] | dict(
    dim=2048, num_layers=16, ffn_dim=8192, rope_scaling=32.0, tied_head=True
)
LLAMA_SIZES["3.2-3B"] = LLAMA_SIZES["3.2-1B"] | dict(dim=3072, num_layers=28, num_heads=24)


@section
class LlamaConfig(LlamaFamilyConfig):
    """Llama 3: RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases."""

    name: Literal["llama"] = "llama"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "3-8B", "3-70B", "3.1-8B", "3.1-70B", "3.1-405B", "3.2-1B", "3.2-3B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: PositiveFloat = 500000.0
    """Base of the RoPE frequencies. Larger values give longer wavelengths."""
    rope_scaling: PositiveFloat = 1.0
    """Llama 3.1's RoPE scaling factor of the low frequencies: 8 for Llama 3.1, 32 for Llama 3.2; 1 disables it."""
    rope_original_seq_len: Positive = 8192
    """Sequence length of the training before RoPE scaling. Unused if `rope_scaling` is 1."""

    hf_architecture = "LlamaForCausalLM"
    hf_model_type = "llama"
    rope_types = ("default", "llama3")
    sizes: ClassVar[dict[str, dict[str, Any]]] = LLAMA_SIZES

    def to_hugging_face(self) -> dict[str, Any]:
        return super().to_hugging_face() | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Any]) -> Self:
        head_dim = values["hidden_size"] // values["num_attention_heads"]
        require(values, attention_bias=False, mlp_bias=False, head_dim=head_dim)
        return cls.published(cls.fields_from_hugging_face(values))
