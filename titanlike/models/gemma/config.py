"""Gemma 2 and the text models of Gemma 3: the blocks of Llama with the options below. Does not import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from titanlike.config.base import NonNegative, NonNegativeFloat, Positive, PositiveFloat, only_from, section
from titanlike.models.common.config import GLOBAL, LOCAL, ParameterSpec, require
from titanlike.models.common.rope_config import rope_fields, rope_of_type, rope_scaling
from titanlike.models.llama.config import LlamaFamilyConfig

# The fields of each published size that differ from the defaults below. All have a tied head.
GEMMA2_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "2B": dict(dim=2304, num_layers=26, num_heads=8, num_kv_heads=4, head_dim=256, query_scalar=256.0, ffn_dim=9216),
    "9B": dict(dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, head_dim=256, query_scalar=256.0, ffn_dim=14336),
    "27B": dict(
        dim=4608, num_layers=46, num_heads=32, num_kv_heads=16, head_dim=128, query_scalar=144.0, ffn_dim=36864
    ),
}
for _size in ("2B", "9B", "27B"):
    GEMMA2_SIZES[_size] |= dict(vocab_size=256000, sliding_window=4096)

GEMMA3_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "270M": dict(dim=640, num_layers=18, num_heads=4, num_kv_heads=1, ffn_dim=2048),
    "1B": dict(dim=1152, num_layers=26, num_heads=4, num_kv_heads=1, ffn_dim=6912),
    "4B": dict(dim=2560, num_layers=34, num_heads=8, num_kv_heads=4, ffn_dim=10240),
    "12B": dict(dim=3840, num_layers=48, num_heads=16, num_kv_heads=8, ffn_dim=15360),
    "27B": dict(dim=5376, num_layers=62, num_heads=32, num_kv_heads=16, ffn_dim=21504),
}
for _size in ("270M", "1B"):
    GEMMA3_SIZES[_size] |= dict(vocab_size=262144, sliding_window=512, max_seq_len=32768)
for _size in ("4B", "12B", "27B"):
    GEMMA3_SIZES[_size] |= dict(vocab_size=262208, sliding_window=1024, max_seq_len=131072, rope_scaling=8.0)
for _size in ("270M", "1B", "4B", "12B"):
    GEMMA3_SIZES[_size] |= dict(head_dim=256, query_scalar=256.0)
GEMMA3_SIZES["27B"] |= dict(head_dim=128, query_scalar=168.0)


@section
class GemmaConfig(LlamaFamilyConfig):
    """What Gemma 2 and Gemma 3 share: a GELU gate, norms before and after attention and feed-forward, a scaled embedding, and
    blocks with sliding-window attention."""

    head_dim: Positive = 64
    """Dimension of an attention head, independent of `dim` and `num_heads`. The published sizes have 128 or 256."""
    query_scalar: PositiveFloat = 64.0
    """Attention scores are divided by its square root. In most published sizes it is the head dimension."""
    sliding_window: NonNegative = 64
    """Number of tokens, the current one included, that a token attends to in blocks with sliding-window attention. 0 disables it.
    On GPUs, these blocks use FlexAttention if `training.attention` is `auto`."""
    sliding_window_pattern: Annotated[NonNegative, only_from("sliding_window", 1)] = 0
    """Every how many blocks one attends to the full sequence: with 6, blocks 5, 11, ... do, and the others use the window. 0: all
    blocks use it. Unused if `sliding_window` is 0."""

    defaults: ClassVar = {"rope_theta": 10000.0}
    tied_head = True
    gelu = True
    own_head_dim = 256

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by, besides the usual factor of 1 / sqrt(head_dim) of the scores."""
        return float((self.head_dim / self.query_scalar) ** 0.5)

    def is_local(self, index: int) -> bool:
        is_global = self.sliding_window_pattern and (index + 1) % self.sliding_window_pattern == 0
        return bool(self.sliding_window and not is_global)

    def block_parameters(self) -> dict[str, ParameterSpec]:
        return {
            "attention_norm.weight": self.norm("input_layernorm"),
            **self.attention_parameters(),
            "post_attention_norm.weight": self.norm("post_attention_layernorm"),
            "ffn_norm.weight": self.norm("pre_feedforward_layernorm"),
            **self.feed_forward_parameters(),
            "post_ffn_norm.weight": self.norm("post_feedforward_layernorm"),
        }

    def problems(self) -> list[str]:
        return super().problems() + self.window_problems()

    def to_hugging_face(self) -> dict[str, Any]:
        if not self.query_scalar.is_integer():
            raise self.not_exportable("query_scalar", "an integer")
        if self.dim % self.num_heads:
            raise self.not_exportable("num_heads", f"a divisor of model.dim = {self.dim}")
        return super().to_hugging_face() | {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "query_pre_attn_scalar": int(self.query_scalar),
            "final_logit_softcapping": self.logit_soft_cap or None,
            "attn_logit_softcapping": self.attention_soft_cap or None,
            "sliding_window": self.sliding_window or self.max_seq_len,
            "sliding_window_pattern": self.sliding_window_pattern,
            "layer_types": self.layer_types(),
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        activation = values.get("hidden_activation") or values.get("hidden_act") or "gelu_pytorch_tanh"
        require({"hidden_activation": activation}, hidden_activation="gelu_pytorch_tanh")
        require(values, attention_bias=False, use_bidirectional_attention=False)
        num_layers = values["num_hidden_layers"]
        pattern = values.get(
            "sliding_window_pattern", values.get("_sliding_window_pattern", cls.sliding_window_pattern)
        )
        kinds = values.get("layer_types") or _layer_types(num_layers, pattern)
        if LOCAL in kinds and kinds != _layer_types(num_layers, pattern):
            pattern = kinds.index(GLOBAL) + 1 if GLOBAL in kinds else 0
        return super().fields_from_hugging_face(values) | {
            "query_scalar": values.get("query_pre_attn_scalar", 256),
            "sliding_window": values.get("sliding_window", 4096) if LOCAL in kinds else 0,
            "sliding_window_pattern": pattern,
        }


@section
class Gemma2Config(GemmaConfig):
    """Gemma 2: soft-capped attention scores and logits; every second block attends to the full sequence."""

    name: Literal["gemma2"] = "gemma2"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "2B", "9B", "27B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    logit_soft_cap: NonNegativeFloat = 30.0
    """Bounds the logits `x` by `cap * tanh(x / cap)`, in the loss and in generation. 0 disables it."""
    attention_soft_cap: NonNegativeFloat = 50.0
    """Bounds the attention scores `x` by `cap * tanh(x / cap)`, before the mask and softmax. 0 disables it. On GPUs, attention is
    FlexAttention then; elsewhere, and unless `training.attention` is `auto`, all scores are in memory at once."""

    defaults: ClassVar = {"sliding_window_pattern": 2}
    hf_architecture = "Gemma2ForCausalLM"
    hf_model_type = "gemma2"
    sizes = GEMMA2_SIZES

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_from_hugging_face(values) | {
            "logit_soft_cap": values.get("final_logit_softcapping", cls.logit_soft_cap) or 0.0,
            "attention_soft_cap": values.get("attn_logit_softcapping", cls.attention_soft_cap) or 0.0,
        }


@section
class Gemma3Config(GemmaConfig):
    """Gemma 3 (text): QK-norm; every sixth block attends to the full sequence, and has RoPE frequencies of its own."""

    name: Literal["gemma3"] = "gemma3"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "270M", "1B", "4B", "12B", "27B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    rope_theta: PositiveFloat = 1000000.0
    """Base of the RoPE frequencies of the blocks that attend to the full sequence."""
    rope_scaling: PositiveFloat = 1.0
    """Divides the RoPE frequencies of the blocks that attend to the full sequence: 8 from 4B on; 1 disables it."""

    defaults: ClassVar = {"num_layers": 6, "sliding_window_pattern": 6}
    hf_architecture = "Gemma3ForCausalLM"
    hf_model_type = "gemma3_text"
    hf_rope_theta = 1000000.0
    rope_local_theta = 10000.0
    rope_types = ("default", "linear")
    rope_scaling_type = "linear"
    sizes = GEMMA3_SIZES

    def attention_parameters(self) -> dict[str, ParameterSpec]:
        return super().attention_parameters() | self.qk_norms()

    def to_hugging_face(self) -> dict[str, Any]:
        scaling = rope_scaling(self)
        return super().to_hugging_face() | {
            # transformers 5 reads rope_parameters, 4 the others.
            "rope_parameters": {
                GLOBAL: {"rope_type": "default", "rope_theta": self.rope_theta, **scaling},
                LOCAL: {"rope_type": "default", "rope_theta": self.rope_local_theta},
            },
            "rope_scaling": scaling or None,
            "rope_local_base_freq": self.rope_local_theta,
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(values, final_logit_softcapping=None, attn_logit_softcapping=None)
        local = rope_of_type(values, LOCAL, "rope_local_base_freq", scaled=False)
        theta = rope_fields(local, ("default",), cls.rope_local_theta)["rope_theta"]
        require({"rope_local_base_freq": theta}, rope_local_base_freq=cls.rope_local_theta)
        return super().fields_from_hugging_face(rope_of_type(values, GLOBAL, "rope_theta"))


def _layer_types(num_layers: int, pattern: int) -> list[str]:
    return [GLOBAL if pattern and (i + 1) % pattern == 0 else LOCAL for i in range(num_layers)]
