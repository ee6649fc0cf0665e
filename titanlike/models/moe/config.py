"""Mixtures of experts: Qwen3-MoE and Mixtral, with the options of DeepSeek-V3's layer. Their blocks are Llama's, with the
layer of `models/common/experts.py`. Does not import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from titanlike.config.base import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    divisors,
    one_of,
    section,
)
from titanlike.models.common.config import ParameterSpec, require
from titanlike.models.llama.config import LAYER, LlamaFamilyConfig

NumExperts = Annotated[int, Field(ge=2, le=4096)]

_QWEN3 = dict(num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151936, num_experts=128, experts_per_token=8)
QWEN3_MOE_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "30B-A3B": dict(dim=2048, num_layers=48, ffn_dim=768, **_QWEN3),
    "235B-A22B": dict(dim=4096, num_layers=94, ffn_dim=1536, **{**_QWEN3, "num_heads": 64}),
}

MIXTRAL_SIZES: dict[str, dict[str, Any]] = {
    "debug": {},
    "8x7B": dict(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=32000),
    "8x22B": dict(
        dim=6144, num_layers=56, num_heads=48, num_kv_heads=8, ffn_dim=16384, vocab_size=32000, max_seq_len=65536
    ),
}


@section
class MoeConfig(LlamaFamilyConfig):
    """What mixture-of-experts models share: the blocks of Llama, with a router and experts instead of one feed-forward layer.

    Each token is computed by the `experts_per_token` experts with the largest scores. No token is dropped.
    """

    ffn_dim: Positive = 128
    """Hidden dimension of an expert."""
    num_experts: NumExperts = 8
    """Number of experts in each block."""
    experts_per_token: Positive = 2
    """Number of experts that compute each token."""
    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of the auxiliary loss that balances the load of the experts over the tokens of each sequence in all blocks:
    `router_aux_loss_coef` of transformers. It has a gradient only: the reported loss does not contain it. 0 disables it."""

    # Fields of Qwen3-MoE only.
    num_shared_experts = 0
    router_score = "softmax"
    normalize_router = True
    router_scale = 1.0
    balance_bias_rate = 0.0
    num_expert_groups = 1
    groups_per_token = 1
    router_bias: ClassVar[bool] = False
    """Whether the router's linear layer has a bias, which is learned."""
    expert_biases: ClassVar[bool] = False
    """Whether the matrices of experts have biases."""
    swiglu_limit: ClassVar[float] = 0.0
    """Bounds the inputs of an expert's gate, which is then `clamped_swiglu`. 0: SiLU without bounds."""
    hf_experts: ClassVar[Mapping[str, str]] = {
        "router": "mlp.gate",
        "w1": "mlp.experts.*.gate_proj",
        "w2": "mlp.experts.*.down_proj",
        "w3": "mlp.experts.*.up_proj",
    }
    """Names of the router and of the matrices of an expert in a block of transformers and, if it is there, of the router's bias and
    of the shared experts."""

    @property
    def experts_of_group_score(self) -> int:
        """The number of experts of a group, the best ones, whose scores are summed to the group's score."""
        return 1 if self.router_score == "softmax" else 2

    @property
    def has_expert_bias(self) -> bool:
        """Whether routers have a bias for the selection."""
        return self.balance_bias_rate > 0

    def feed_forward_parameters(self) -> dict[str, ParameterSpec]:
        router = ParameterSpec((self.num_experts, self.dim), "router", f"{LAYER}.{self.hf_experts['router']}.weight")
        # Each tensor-parallel rank has a shard of the hidden dimension of every expert, and routes all tokens.
        parameters = {"router.weight": router}
        if self.has_expert_bias:
            hf_name = f"{LAYER}.{self.hf_experts['bias']}" if "bias" in self.hf_experts else ""
            parameters["router.expert_bias"] = ParameterSpec((self.num_experts,), "router", hf_name, keeps_float32=True)
        for name in ("w1", "w2", "w3"):
            shape = (self.dim, self.ffn_dim) if name == "w2" else (self.ffn_dim, self.dim)
            hf_name = f"{LAYER}.{self.hf_experts[name]}.weight"
            parameters[f"experts.{name}"] = ParameterSpec((self.num_experts, *shape), "experts", hf_name)
        if self.num_shared_experts:
            hidden = self.num_shared_experts * self.ffn_dim
            parameters |= self.gated_parameters("shared", hidden, self.hf_experts.get("shared", ""))
        return {f"feed_forward.{name}": spec for name, spec in parameters.items()}

    def num_matmul_parameters(self) -> int:
        return super().num_matmul_parameters() + self._num_mixtures() * self._expert_size() * self.experts_per_token

    def num_active_parameters(self) -> int:
        """Returns the number of parameters that compute a token, including the embedding."""
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters() - self._num_mixtures() * self._expert_size() * idle

    def _num_mixtures(self) -> int:
        return self.num_layers - self.num_dense_layers + self.num_mtp_layers

    def _expert_size(self) -> int:
        return 3 * self.ffn_dim * self.dim

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.experts_per_token > self.num_experts:
            problems.append(
                f"model.experts_per_token = {self.experts_per_token} exceeds model.num_experts = {self.num_experts}; use "
                f"{self.num_experts} or less"
            )
        return problems

    def expert_parallel_problems(self, expert: int) -> list[str]:
        if self.num_experts % expert == 0:
            return []
        near = [n for n in divisors(self.num_experts) if n <= expert][-4:]
        return [
            f"parallelism.expert = {expert} does not divide model.num_experts = {self.num_experts}; use {one_of(near)}"
        ]

    def to_hugging_face(self) -> dict[str, Any]:
        return super().to_hugging_face() | {
            "num_experts_per_tok": self.experts_per_token,
            "router_aux_loss_coef": self.balance_loss,
            "output_router_logits": False,
            "sliding_window": None,
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        # Not the coefficient of the auxiliary loss, with which the published models were trained: a recipe sets it for itself.
        require(values, sliding_window=None)
        return super().fields_from_hugging_face(values) | {"experts_per_token": values["num_experts_per_tok"]}


@section
class Qwen3MoeConfig(MoeConfig):
    """Qwen3 with a mixture of experts in every block: QK-norm, and a head dimension that does not depend on the model dimension."""

    name: Literal["qwen3_moe"] = "qwen3_moe"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "30B-A3B", "235B-A22B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""
    head_dim: Positive = 64
    """Dimension of an attention head, independent of `dim` and `num_heads`. 64 and 128 are fast; smaller ones are slow. All
    published sizes have 128."""
    num_shared_experts: NonNegative = 0
    """Number of experts that compute every token, besides the others: one feed-forward layer of this many times `ffn_dim`."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits. `softmax`: over all experts. `sigmoid`: of each expert by itself, as in DeepSeek-V3."""
    normalize_router: bool = True
    """Divide the scores of a token's experts by their sum."""
    router_scale: PositiveFloat = 1.0
    """Multiplies the scores of a token's experts, after the normalization. DeepSeek-V3 has 2.5."""
    balance_bias_rate: NonNegativeFloat = 0.0
    """Step size of a bias of each expert that is added to its score for the selection only, and that decreases where an expert had
    more tokens than the average in a training step, and increases where it had less. DeepSeek-V3 has 0.001. 0: no bias."""

    defaults: ClassVar = {"max_seq_len": 40960}
    hf_architecture = "Qwen3MoeForCausalLM"
    hf_model_type = "qwen3_moe"
    sizes = QWEN3_MOE_SIZES
    own_head_dim = 128

    def attention_parameters(self) -> dict[str, ParameterSpec]:
        return super().attention_parameters() | self.qk_norms()

    def to_hugging_face(self) -> dict[str, Any]:
        only = {"num_shared_experts": 0, "router_score": "softmax", "router_scale": 1.0, "balance_bias_rate": 0.0}
        for name, value in only.items():
            if getattr(self, name) != value:
                raise self.not_exportable(name, repr(value))
        return super().to_hugging_face() | {
            "attention_bias": False,
            "use_sliding_window": False,
            "num_experts": self.num_experts,
            "moe_intermediate_size": self.ffn_dim,
            # Of dense blocks, of which there are none: the sum over a token's experts, as in the published models.
            "intermediate_size": self.ffn_dim * self.experts_per_token,
            "norm_topk_prob": self.normalize_router,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(values, attention_bias=False, use_sliding_window=False, decoder_sparse_step=1, mlp_only_layers=[])
        return super().fields_from_hugging_face(values) | {
            "ffn_dim": values["moe_intermediate_size"],
            # The name of the published models and of transformers 4. transformers 5 writes the other.
            "num_experts": values["num_experts" if "num_experts" in values else "num_local_experts"],
            "normalize_router": values.get("norm_topk_prob", False),
        }


@section
class MixtralConfig(MoeConfig):
    """Mixtral: the blocks of Llama with a mixture of experts."""

    name: Literal["mixtral"] = "mixtral"
    """Architecture. It decides which keys this section has."""
    size: Literal["debug", "8x7B", "8x22B"] = "debug"
    """Published size. It sets every key below that the recipe does not."""

    defaults: ClassVar = {"max_seq_len": 32768}
    norm_eps = 1e-5
    hf_rope_theta = 1000000.0
    hf_architecture = "MixtralForCausalLM"
    hf_model_type = "mixtral"
    sizes = MIXTRAL_SIZES
    hf_experts: ClassVar = {
        "router": "block_sparse_moe.gate",
        "w1": "block_sparse_moe.experts.*.w1",
        "w2": "block_sparse_moe.experts.*.w2",
        "w3": "block_sparse_moe.experts.*.w3",
    }

    def to_hugging_face(self) -> dict[str, Any]:
        return super().to_hugging_face() | {"num_local_experts": self.num_experts, "router_jitter_noise": 0.0}

    @classmethod
    def fields_from_hugging_face(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        require(values, router_jitter_noise=0.0)
        return super().fields_from_hugging_face(values) | {"num_experts": values["num_local_experts"]}
