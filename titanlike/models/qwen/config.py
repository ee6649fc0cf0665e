"""Qwen2, Qwen2.5 and Qwen3 (dense): the blocks of Llama with biases of queries, keys and values, or with an RMSNorm over each head
of queries and keys. Does not import torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from titanlike.config.base import Positive, PositiveFloat, section
from titanlike.models.common.config import ParameterSpec, require
from titanlike.models.llama.config import LlamaFamilyConfig

# The dense base models of Qwen2.5. All have 32,768 positions here; `from_hugging_face` reads the number from config.json.
QWEN2_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "2.5-0.5B": dict(dim=896, num_layers=24, num_heads=14, num_kv_heads=2, ffn_dim=4864),
    "2.5-1.5B": dict(dim=1536, num_layers=28, num_heads=12, num_kv_heads=2, ffn_dim=8960),
    "2.5-3B": dict(dim=2048, num_layers=36, num_heads=16, num_kv_heads=2, ffn_dim=11008),
    "2.5-7B": dict(dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, ffn_dim=18944),
    "2.5-14B": dict(dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, ffn_dim=13824),
    "2.5-32B": dict(dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, ffn_dim=27648),
    "2.5-72B": dict(dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=29568),
}
for _size in ("2.5-0.5B", "2.5-1.5B", "2.5-3B"):
    QWEN2_SIZES[_size] |= dict(vocab_size=151936, tied_head=True)
for _size in ("2.5-7B", "2.5-14B", "2.5-32B", "2.5-72B"):
    QWEN2_SIZES[_size] |= dict(vocab_size=152064)


@section
class Qwen2Config(LlamaFamilyConfig):
    """Qwen2 and Qwen2.5 (dense): the blocks of Llama with biases in the projections of queries, keys and values."""

    name: Literal["qwen2"] = "qwen2"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "2.5-0.5B", "2.5-1.5B", "2.5-3B", "2.5-7B", "2.5-14B", "2.5-32B", "2.5-72B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of RMSNorm."""
    tied_head: bool = False
    """Share the weight of the embedding and the LM head."""

    defaults: ClassVar = {"max_seq_len": 32768}
    hf_architecture = "Qwen2ForCausalLM"
    hf_model_type = "qwen2"
    hf_fixed: ClassVar = {"use_sliding_window": False}
    hf_unused: ClassVar = {"sliding_window": None}
    sizes = QWEN2_SIZES

    def attention_parameters(self) -> dict[str, ParameterSpec]:
        return self.with_qkv_biases(super().attention_parameters())

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(values, use_mrope=False)
        return super().fields_from_hugging_face(values)


PUBLISHED = dict(head_dim=128, num_kv_heads=8, vocab_size=151936)
QWEN3_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "0.6B": dict(dim=1024, num_layers=28, num_heads=16, ffn_dim=3072, tied_head=True, **PUBLISHED),
    "1.7B": dict(dim=2048, num_layers=28, num_heads=16, ffn_dim=6144, tied_head=True, **PUBLISHED),
    "4B": dict(dim=2560, num_layers=36, num_heads=32, ffn_dim=9728, tied_head=True, **PUBLISHED),
    "8B": dict(dim=4096, num_layers=36, num_heads=32, ffn_dim=12288, **PUBLISHED),
    "14B": dict(dim=5120, num_layers=40, num_heads=40, ffn_dim=17408, **PUBLISHED),
    "32B": dict(dim=5120, num_layers=64, num_heads=64, ffn_dim=25600, **PUBLISHED),
}


@section
class Qwen3Config(LlamaFamilyConfig):
    """Qwen3 (dense): the blocks of Llama with QK-norm, and a head dimension that does not depend on the model dimension."""

    name: Literal["qwen3"] = "qwen3"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "0.6B", "1.7B", "4B", "8B", "14B", "32B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    head_dim: Positive = 64
    """Dimension of an attention head, independent of `dim` and `num_heads`. 64 and 128 are fast; smaller ones are slow. All
    published sizes have 128."""
    tied_head: bool = False
    """Share the weight of the embedding and the LM head."""

    defaults: ClassVar = {"max_seq_len": 40960}
    hf_architecture = "Qwen3ForCausalLM"
    hf_model_type = "qwen3"
    hf_fixed: ClassVar = {"attention_bias": False, "use_sliding_window": False}
    hf_unused: ClassVar = {"sliding_window": None}
    sizes = QWEN3_SIZES
    own_head_dim = 128

    def attention_parameters(self) -> dict[str, ParameterSpec]:
        return super().attention_parameters() | self.qk_norms()
