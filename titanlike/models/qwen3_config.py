"""Qwen3 (dense): the blocks of Llama (`llama.py`) with an RMSNorm over each head of queries and keys. Does not import torch."""

from typing import Any, ClassVar, Literal

from titanlike.config.base import Positive, section
from titanlike.models.llama_config import LlamaFamilyConfig

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
    qk_norm = True
    own_head_dim = 128
