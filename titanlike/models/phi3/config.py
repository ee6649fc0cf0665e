"""Phi-3 and Phi-4: the blocks of Mistral. Checkpoints of transformers have one matrix for queries, keys and values, and one for
both inputs of the gate. Does not import torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from titanlike.config.base import NonNegative, section
from titanlike.models.common.config import ParameterSpec
from titanlike.models.llama.config import LAYER, LlamaFamilyConfig

# The fields of each published size that differ from the defaults below.
_14B = dict(dim=5120, num_layers=40, num_heads=40, num_kv_heads=10, ffn_dim=17920)
PHI3_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "3-mini-4k": dict(
        dim=3072, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=8192, vocab_size=32064, sliding_window=2047
    ),
    "3-medium-4k": dict(vocab_size=32064, sliding_window=2047, **_14B),
    "4-14B": dict(vocab_size=100352, max_seq_len=16384, rope_theta=250000.0, **_14B),
}
FUSED = {
    "self_attn.qkv_proj": ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight"),
    "mlp.gate_up_proj": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
}  # the matrices of a block of transformers that are several of ours


@section
class Phi3Config(LlamaFamilyConfig):
    """Phi-3 and Phi-4 without LongRoPE: Llama with sliding-window attention in all blocks or in none."""

    name: Literal["phi3"] = "phi3"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "3-mini-4k", "3-medium-4k", "4-14B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    sliding_window: NonNegative = 0
    """Number of tokens, the current one included, that a token attends to: 2,047 in Phi-3. 0: all before it. On GPUs, attention
    with a window is FlexAttention if `training.attention` is `auto`."""

    defaults: ClassVar = {"rope_theta": 10000.0, "max_seq_len": 4096}
    norm_eps = 1e-5
    hf_architecture = "Phi3ForCausalLM"
    hf_model_type = "phi3"
    hf_fixed: ClassVar = {"attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    hf_unused: ClassVar = {"pad_token_id": None}  # by default, 32000
    sizes = PHI3_SIZES

    def is_local(self, index: int) -> bool:
        return self.sliding_window > 0

    def block_parameters(self) -> dict[str, ParameterSpec]:
        parameters = super().block_parameters()
        for hf_name, names in FUSED.items():
            parts = tuple(parameters[name].shape[0] for name in names)
            for part, name in enumerate(names):
                stored = f"{LAYER}.{hf_name}.weight"
                parameters[name] = parameters[name]._replace(hf_name=stored, part=part, parts=parts)
        return parameters

    def to_hugging_face(self) -> dict[str, Any]:
        return super().to_hugging_face() | {"sliding_window": self.sliding_window or None}

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_from_hugging_face(values) | {"sliding_window": values.get("sliding_window") or 0}
