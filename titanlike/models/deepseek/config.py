"""DeepSeek-V2 and V3: multi-head latent attention, and experts in all but the first blocks. Does not import torch."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import Self

from titanlike.config.base import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    divisors,
    one_of,
    only_from,
    section,
)
from titanlike.models.common.config import ParameterSpec, require
from titanlike.models.common.rope_config import SCALES_ROPE, odd_problems, yarn_problems
from titanlike.models.llama.config import LAYER
from titanlike.models.moe.config import MoeConfig

# The fields of each published size that differ from the defaults below.
_PUBLISHED = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_YARN = dict(max_seq_len=163840, rope_scaling=40.0)
_V2 = dict(vocab_size=102400, num_shared_experts=2, experts_per_token=6, **_PUBLISHED, **_YARN)
DEEPSEEK_V2_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "Lite": dict(dim=2048, num_layers=27, num_heads=16, dense_ffn_dim=10944, ffn_dim=1408, num_experts=64, **_V2),
    "236B": dict(
        dim=5120, num_layers=60, num_heads=128, dense_ffn_dim=12288, ffn_dim=1536, num_experts=160, q_lora_rank=1536,
        num_expert_groups=8, groups_per_token=3, router_scale=16.0, **_V2,
    ),
}  # fmt: skip
DEEPSEEK_V3_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "671B": dict(
        dim=7168, num_layers=61, num_heads=128, num_dense_layers=3, dense_ffn_dim=18432, ffn_dim=2048, vocab_size=129280,
        num_experts=256, experts_per_token=8, q_lora_rank=1536, num_expert_groups=8, groups_per_token=4, **_PUBLISHED, **_YARN,
    ),
    "Moonlight-16B": dict(
        dim=2048, num_layers=27, num_heads=16, dense_ffn_dim=11264, ffn_dim=1408, vocab_size=163840, num_experts=64,
        experts_per_token=6, q_lora_rank=0, num_shared_experts=2, num_expert_groups=1, groups_per_token=1, router_scale=2.446,
        norm_eps=1e-5, rope_theta=50000.0, max_seq_len=8192, **_PUBLISHED,
    ),
}  # fmt: skip


@section
class DeepseekConfig(MoeConfig):
    """What DeepSeek-V2 and V3 share. Keys and values of all heads are computed from one latent vector of each token, which is all
    that the KV cache holds, and the key that RoPE rotates is the same for all heads. The first blocks have no experts."""

    num_dense_layers: NonNegative = 1
    """Number of blocks, the first ones, that have a feed-forward layer instead of experts."""
    dense_ffn_dim: Annotated[Positive, only_from("num_dense_layers", 1)] = 512
    """Hidden dimension of the feed-forward layers of blocks without experts."""
    num_shared_experts: NonNegative = 1
    """Number of experts that compute every token, besides the others: one feed-forward layer of this many times `ffn_dim`."""
    q_lora_rank: NonNegative = 0
    """Dimension of the latent vector that queries are computed from. 0: they are computed from the residual stream."""
    kv_lora_rank: Positive = 64
    """Dimension of the latent vector that keys and values are computed from."""
    qk_nope_head_dim: Positive = 32
    """Dimensions of a head of queries and keys that have no position."""
    qk_rope_head_dim: Positive = 16
    """Further dimensions of a head of queries and keys, which RoPE rotates. Their keys are the same for all heads."""
    v_head_dim: Positive = 32
    """Dimension of a head of values."""
    num_expert_groups: Positive = 1
    """Number of groups into which the experts are divided, in order. It divides `num_experts`."""
    groups_per_token: Positive = 1
    """Number of groups, those with the best scores, that a token's experts are selected from. There is no limit if it is
    `num_expert_groups`."""
    router_scale: PositiveFloat = 1.0
    """Multiplies the scores of a token's experts."""
    rope_scaling: PositiveFloat = 1.0
    """YaRN's factor of the sequence length: 40 in the published models; 1 disables it."""
    rope_original_seq_len: Annotated[Positive, SCALES_ROPE] = 4096
    """Sequence length of the training before RoPE scaling. Unused if `rope_scaling` is 1."""
    rope_mscale: Annotated[PositiveFloat, SCALES_ROPE] = 1.0
    """YaRN multiplies attention scores by the square of 1 + 0.1 x this x the logarithm of `rope_scaling`."""

    defaults: ClassVar = {"rope_theta": 10000.0}
    num_kv_heads: ClassVar[property] = property(lambda self: self.num_heads)  # type: ignore[misc]
    rope_types = ("default", "yarn")
    rope_scaling_type = "yarn"
    hf_fixed: ClassVar = {"attention_bias": False}
    hf_unused: ClassVar = {"moe_layer_freq": 1, "pretraining_tp": 1}
    hf_experts: ClassVar = {**MoeConfig.hf_experts, "shared": "mlp.shared_experts"}

    @property
    def head_dim(self) -> int:
        """The dimension of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def query_scale(self) -> float:
        scaled = max(self.rope_scaling, 1.0)
        return (1.0 + 0.1 * self.rope_mscale * math.log(scaled)) ** 2

    def attention_parameters(self) -> dict[str, ParameterSpec]:
        heads, rank, hf = self.num_heads, self.kv_lora_rank, f"{LAYER}.self_attn"
        queries, outputs = heads * self.head_dim, heads * self.v_head_dim
        expanded = heads * (self.qk_nope_head_dim + self.v_head_dim)
        parameters = {"wq": ParameterSpec((queries, self.dim), "colwise", f"{hf}.q_proj.weight")}
        if self.q_lora_rank:
            parameters = {
                "wq_a": ParameterSpec((self.q_lora_rank, self.dim), "replicated", f"{hf}.q_a_proj.weight"),
                "q_norm": ParameterSpec((self.q_lora_rank,), "replicated", f"{hf}.q_a_layernorm.weight"),
                "wq_b": ParameterSpec((queries, self.q_lora_rank), "colwise", f"{hf}.q_b_proj.weight"),
            }
        latent = rank + self.qk_rope_head_dim
        parameters |= {
            "wkv_a": ParameterSpec((latent, self.dim), "replicated", f"{hf}.kv_a_proj_with_mqa.weight"),
            "kv_norm": ParameterSpec((rank,), "replicated", f"{hf}.kv_a_layernorm.weight"),
            "wkv_b": ParameterSpec((expanded, rank), "colwise", f"{hf}.kv_b_proj.weight"),
            "wo": ParameterSpec((self.dim, outputs), "rowwise", f"{hf}.o_proj.weight"),
        }
        return {f"attention.{name}.weight": spec for name, spec in parameters.items()}

    def parameters_of(self, index: int) -> dict[str, ParameterSpec]:
        if self.has_experts(index):
            return self.block_parameters()
        block = {name: spec for name, spec in self.block_parameters().items() if not name.startswith("feed_forward")}
        return block | self.gated_parameters("feed_forward", self.dense_ffn_dim, "mlp")

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.num_dense_layers >= self.num_layers:
            problems.append(
                f"model.num_dense_layers = {self.num_dense_layers} leaves no block with experts of model.num_layers = "
                f"{self.num_layers}; use {self.num_layers - 1} or less"
            )
        groups, size = self.num_expert_groups, self.num_experts // self.num_expert_groups
        if self.num_experts % groups:
            near = [n for n in divisors(self.num_experts) if n <= groups][-4:]
            problems.append(
                f"model.num_expert_groups = {groups} does not divide model.num_experts = {self.num_experts}; use {one_of(near)}"
            )
        elif self.groups_per_token > groups:
            problems.append(
                f"model.groups_per_token = {self.groups_per_token} exceeds model.num_expert_groups = {groups}; use {groups} or less"
            )
        elif self.groups_per_token * size < self.experts_per_token:
            problems.append(
                f"model.groups_per_token = {self.groups_per_token} groups of {size} experts have fewer than "
                f"model.experts_per_token = {self.experts_per_token}; use {-(-self.experts_per_token // size)} or more groups"
            )
        elif groups > 1 and size < self.experts_of_group_score:
            problems.append(
                f"model.num_expert_groups = {groups} are groups of {size} expert, but the score of a group is the sum of its best "
                f"{self.experts_of_group_score}; use {self.num_experts // self.experts_of_group_score} or fewer groups"
            )
        return problems + yarn_problems(self)

    def head_dim_problems(self) -> list[str]:
        return odd_problems("model.qk_rope_head_dim", self.qk_rope_head_dim)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return super().tensor_parallel_sizes() | {"dense_ffn_dim": self.dense_ffn_dim}

    def to_hugging_face(self) -> dict[str, Any]:
        if not self.num_shared_experts:
            raise self.not_exportable("num_shared_experts", "1 or more")
        limited = self.groups_per_token < self.num_expert_groups
        return super().to_hugging_face() | {
            "intermediate_size": self.dense_ffn_dim,
            "moe_intermediate_size": self.ffn_dim,
            "head_dim": self.qk_rope_head_dim,  # what transformers rotates
            "first_k_dense_replace": self.num_dense_layers,
            "n_shared_experts": self.num_shared_experts,
            "n_routed_experts": self.num_experts,
            "n_group": self.num_expert_groups,
            "topk_group": self.groups_per_token,
            "topk_method": self.hf_topk_method(limited),
            "scoring_func": self.router_score,
            "norm_topk_prob": self.normalize_router,
            "routed_scaling_factor": self.router_scale,
            "q_lora_rank": self.q_lora_rank or None,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
        }

    @classmethod
    def hf_topk_method(cls, limited: bool) -> str:
        """Returns the name of the selection of experts, which is `limited` to some groups or not."""
        raise NotImplementedError

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(values, moe_layer_freq=1, scoring_func=cls.router_score, norm_topk_prob=cls.normalize_router)
        values = dict(values)
        groups = values.get("n_group") or 1
        per_token = values.get("topk_group") or groups
        found = values.get("topk_method") or cls.hf_topk_method(False)  # what transformers has without the key
        require({"topk_method": found}, topk_method=cls.hf_topk_method(per_token < groups))
        fields = super().fields_from_hugging_face(values | {"head_dim": None})
        del fields["num_kv_heads"]
        require(values, num_key_value_heads=fields["num_heads"])
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return fields | {name: values[name] for name in names} | {
            "dense_ffn_dim": values["intermediate_size"],
            "ffn_dim": values["moe_intermediate_size"],
            "num_dense_layers": values["first_k_dense_replace"],
            "num_shared_experts": values["n_shared_experts"],
            "num_experts": values["n_routed_experts"],
            "num_expert_groups": groups,
            "groups_per_token": per_token,
            "router_scale": values["routed_scaling_factor"],
            "q_lora_rank": values.get("q_lora_rank") or 0,
        }  # fmt: skip


@section
class DeepseekV2Config(DeepseekConfig):
    """DeepSeek-V2: softmax scores, which are not normalized; a group of experts has the score of its best one."""

    name: Literal["deepseek_v2"] = "deepseek_v2"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "Lite", "236B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""

    defaults: ClassVar = {"rope_mscale": 0.707}
    hf_architecture = "DeepseekV2ForCausalLM"
    hf_model_type = "deepseek_v2"
    hf_fixed: ClassVar = DeepseekConfig.hf_fixed | {"mlp_bias": False}
    normalize_router = False
    sizes = DEEPSEEK_V2_SIZES

    @classmethod
    def hf_topk_method(cls, limited: bool) -> str:
        return "group_limited_greedy" if limited else "greedy"

    def to_hugging_face(self) -> dict[str, Any]:
        for name in ("qk_nope_head_dim", "kv_lora_rank"):
            if getattr(self, name) % 2:  # transformers views what follows these channels as complex numbers
                raise self.not_exportable(name, "an even number")
        if self.dim % self.num_heads:
            raise self.not_exportable("num_heads", f"a divisor of model.dim = {self.dim}")
        return super().to_hugging_face()


@section
class DeepseekV3Config(DeepseekConfig):
    """DeepSeek-V3: sigmoid scores, with a bias for the selection that balances the load; the score of a group of experts is the sum
    of its best two."""

    name: Literal["deepseek_v3"] = "deepseek_v3"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "671B", "Moonlight-16B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    balance_bias_rate: NonNegativeFloat = 0.001
    """Step size of a bias of each expert that is added to its score for the selection only, and that decreases where an expert had
    more tokens than the average in a training step, and increases where it had less. 0: the bias does not change."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of RMSNorm, but for the latent vectors, which have 1e-6."""
    num_mtp_layers: Annotated[int, Field(ge=0, le=8)] = 0
    """Number of further tokens that each position learns to predict, with a block of multi-token prediction for each. Validation
    and generation do not compute these blocks. The published 671B has 1. 0 disables it."""
    mtp_loss_weight: Annotated[PositiveFloat, only_from("num_mtp_layers", 1)] = 0.3
    """Weight of the mean of the losses of further tokens, each normalized as the loss. They have a gradient only: the reported loss
    does not contain them. DeepSeek-V3 had 0.3 for the first 10 of its 14.8 trillion tokens, and then 0.1. Unused if
    `num_mtp_layers` is 0."""

    defaults: ClassVar = {
        "q_lora_rank": 96, "num_expert_groups": 4, "groups_per_token": 2, "router_scale": 2.5,
    }  # fmt: skip
    has_expert_bias = True
    hf_architecture = "DeepseekV3ForCausalLM"
    hf_model_type = "deepseek_v3"
    hf_fixed: ClassVar = DeepseekConfig.hf_fixed | {"rope_interleave": True}
    hf_experts: ClassVar = {**DeepseekConfig.hf_experts, "bias": "mlp.gate.e_score_correction_bias"}
    router_score = "sigmoid"
    sizes = DEEPSEEK_V3_SIZES

    def parameters_of(self, index: int) -> dict[str, ParameterSpec]:
        if index < self.num_layers:
            return super().parameters_of(index)
        own = {
            "enorm.weight": self.norm("enorm"),
            "hnorm.weight": self.norm("hnorm"),
            # Tensor-parallel ranks compute their tokens, as they do in the norms.
            "eh_proj.weight": ParameterSpec((self.dim, 2 * self.dim), "replicated", f"{LAYER}.eh_proj.weight"),
            "head_norm.weight": self.norm("shared_head.norm"),
        }
        return self.block_parameters() | own

    def to_hugging_face(self) -> dict[str, Any]:
        return super().to_hugging_face() | {"num_nextn_predict_layers": self.num_mtp_layers}

    def hf_copies(self) -> dict[str, str]:
        layers = [f"model.layers.{self.num_layers + i}" for i in range(self.num_mtp_layers)]
        return {f"{layer}.embed_tokens.weight": "tok_embeddings.weight" for layer in layers} | {
            f"{layer}.shared_head.head.weight": "output.weight" for layer in layers
        }

    def with_stored(self, names: Collection[str]) -> Self:
        # transformers keeps the key of config.json in folders that it writes without these blocks.
        number = sum(f"model.layers.{self.num_layers + i}.eh_proj.weight" in names for i in range(8))
        return replace(self, num_mtp_layers=number)

    @classmethod
    def hf_topk_method(cls, limited: bool) -> str:
        return "noaux_tc"
