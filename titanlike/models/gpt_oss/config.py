"""GPT-OSS: the blocks of Llama with attention sinks, a sliding window in every second block, and experts with biases
and a clamped SwiGLU. Does not import torch."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from titanlike.config.base import NonNegative, Positive, PositiveFloat, section
from titanlike.models.common.config import LOCAL, ParameterSpec
from titanlike.models.common.rope_config import SCALES_ROPE, rope_scaling, yarn_problems
from titanlike.models.llama.config import LAYER
from titanlike.models.moe.config import MoeConfig

# The fields of each published size that differ from the defaults below.
_PUBLISHED = dict(
    dim=2880, num_heads=64, num_kv_heads=8, ffn_dim=2880, vocab_size=201088, experts_per_token=4, sliding_window=128,
    rope_scaling=32.0,
)  # fmt: skip
GPT_OSS_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "20B": dict(num_layers=24, num_experts=32, **_PUBLISHED),
    "120B": dict(num_layers=36, num_experts=128, **_PUBLISHED),
}


@section
class GptOssConfig(MoeConfig):
    """GPT-OSS: each head has an attention sink, a logit in the denominator of its softmax. Blocks 0, 2, 4, ... have
    sliding-window attention. All linear layers of a block have biases, also in the experts."""

    name: Literal["gpt_oss"] = "gpt_oss"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "20B", "120B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    head_dim: Positive = 64
    """Dimension of an attention head, independent of `dim` and `num_heads`. All published sizes have 64."""
    sliding_window: NonNegative = 64
    """Number of tokens, the current one included, that a token attends to in blocks 0, 2, 4, ... The others attend to the full
    sequence. The published sizes have 128. 0 disables it."""
    rope_scaling: PositiveFloat = 1.0
    """YaRN's factor of the sequence length: 32 in the published models; 1 disables it."""
    rope_original_seq_len: Annotated[Positive, SCALES_ROPE] = 4096
    """Sequence length of the training before RoPE scaling. Unused if `rope_scaling` is 1."""

    defaults: ClassVar = {"rope_theta": 150000.0, "max_seq_len": 131072}
    norm_eps = 1e-5
    has_sinks = True
    router_bias = True
    expert_biases = True
    swiglu_limit = 7.0
    own_head_dim = 64
    rope_types = ("default", "yarn")
    rope_scaling_type = "yarn"
    rope_truncate = False
    hf_rope_theta = 150000.0
    hf_architecture = "GptOssForCausalLM"
    hf_model_type = "gpt_oss"
    # transformers 4 has no key of the slope of the sigmoid, which has this value.
    hf_fixed: ClassVar = {"attention_bias": True, "swiglu_limit": swiglu_limit, "swiglu_alpha": 1.702}
    sizes = GPT_OSS_SIZES

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by, besides the usual factor of 1 / sqrt(head_dim) of the scores."""
        # Published models multiply cosines and sines by the root of this, which the scores have squared.
        return float((1.0 + 0.1 * math.log(max(self.rope_scaling, 1.0))) ** 2)

    def is_local(self, index: int) -> bool:
        return self.sliding_window > 0 and index % 2 == 0

    def attention_parameters(self) -> dict[str, ParameterSpec]:
        hf = f"{LAYER}.self_attn"
        return self.with_qkv_biases(super().attention_parameters()) | {
            "attention.wo.bias": ParameterSpec((self.dim,), "rowwise", f"{hf}.o_proj.bias"),
            "attention.sinks.weight": ParameterSpec((self.num_heads,), "head_parallel", f"{hf}.sinks"),
        }

    def feed_forward_parameters(self) -> dict[str, ParameterSpec]:
        parameters, biases = dict[str, ParameterSpec](), dict[str, ParameterSpec]()
        for name, router_shape in (("weight", (self.num_experts, self.dim)), ("bias", (self.num_experts,))):
            parameters[f"router.{name}"] = ParameterSpec(router_shape, "router", f"{LAYER}.mlp.router.{name}")
        # All experts of a block are one stored tensor, and the outputs of w1 and w3 alternate in it.
        both = (self.ffn_dim, self.ffn_dim)
        for name, hf_name, part, parts in (
            ("w1", "gate_up_proj", 0, both), ("w2", "down_proj", 0, ()), ("w3", "gate_up_proj", 1, both),
        ):  # fmt: skip
            outputs, inputs = (self.dim, self.ffn_dim) if name == "w2" else (self.ffn_dim, self.dim)
            stored = f"{LAYER}.mlp.experts.{hf_name}"
            shape = (self.num_experts, outputs, inputs)
            parameters[f"experts.{name}"] = ParameterSpec(shape, "experts", stored, part, parts, transposed=True)
            biases[f"experts.{name}_bias"] = ParameterSpec(shape[:2], "experts", f"{stored}_bias", part, parts)
        return {f"feed_forward.{name}": spec for name, spec in (parameters | biases).items()}

    def num_active_parameters(self) -> int:
        biases = 2 * self.ffn_dim + self.dim
        return super().num_active_parameters() - self.num_layers * biases * (self.num_experts - self.experts_per_token)

    def problems(self) -> list[str]:
        return super().problems() + yarn_problems(self)

    def to_hugging_face(self) -> dict[str, Any]:
        return super().to_hugging_face() | {
            "num_local_experts": self.num_experts,
            "sliding_window": self.sliding_window or self.max_seq_len,
            "layer_types": self.layer_types(),
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        # Without RoPE parameters, transformers uses the published models'.
        rope = values.get("rope_parameters")
        rope = rope_scaling(cls(rope_scaling=32.0)) if rope is None else rope
        fields = super().fields_from_hugging_face({**values, "rope_parameters": rope, "sliding_window": None})
        has_window = LOCAL in (values.get("layer_types") or [LOCAL])
        window = (values.get("sliding_window") or 0) if has_window else 0
        return fields | {"num_experts": values["num_local_experts"], "sliding_window": window}
