"""Mixture-of-experts models in plain PyTorch: the blocks of `models/llama.py`, whose feed-forward layer is that of
`models/experts.py`."""

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from titanlike.config.model_configs import MixtralConfig, MoeConfig, Qwen3MoeConfig
from titanlike.models.hf_tensors import HFTensor
from titanlike.models.llama import HF_TENSORS, TENSOR_PLAN, Llama
from titanlike.models.qwen3 import Qwen3
from titanlike.models.registry import register_model

FEED_FORWARD = "layers.*.feed_forward."

# Each tensor-parallel rank has a shard of the hidden dimension of every expert, and routes all tokens.
EXPERTS_PLAN = {
    "layers.*.feed_forward.router": "router",
    "layers.*.feed_forward.experts": "experts",
}
SHARED_PLAN = {
    "layers.*.feed_forward.shared.w1": "colwise",
    "layers.*.feed_forward.shared.w2": "rowwise",
    "layers.*.feed_forward.shared.w3": "colwise",
}


T = TypeVar("T")


def _without_feed_forward(plan: Mapping[str, T]) -> dict[str, T]:
    return {name: entry for name, entry in plan.items() if not name.startswith(FEED_FORWARD)}


def _hf_experts(layer: str, w1: str, w2: str, w3: str) -> dict[str, HFTensor]:
    """Returns where the router and the experts are in checkpoints of transformers, which have one tensor per expert."""
    names = {"w1": w1, "w2": w2, "w3": w3}
    experts = {
        f"{FEED_FORWARD}experts.{name}": HFTensor(f"{layer}.experts.*.{stored}.weight", stacked=True)
        for name, stored in names.items()
    }
    return {f"{FEED_FORWARD}router.weight": HFTensor(f"{layer}.gate.weight"), **experts}


class MoeModel(Llama):
    """A decoder with a mixture of experts in every block."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        if config.num_shared_experts:
            self.tensor_plan = {**self.tensor_plan, **SHARED_PLAN}  # type: ignore[misc]


@register_model(MixtralConfig)
class Mixtral(MoeModel):
    """A Mixtral decoder."""

    tensor_plan: ClassVar[Mapping[str, str]] = _without_feed_forward(TENSOR_PLAN) | EXPERTS_PLAN
    # The parameters in checkpoints of transformers' MixtralForCausalLM.
    hf_tensors: ClassVar[Mapping[str, HFTensor]] = _without_feed_forward(HF_TENSORS) | _hf_experts(
        "model.layers.*.block_sparse_moe", "w1", "w2", "w3"
    )


@register_model(Qwen3MoeConfig)
class Qwen3Moe(MoeModel):
    """A Qwen3-MoE decoder: norms of queries and keys as in Qwen3."""

    tensor_plan: ClassVar[Mapping[str, str]] = _without_feed_forward(Qwen3.tensor_plan) | EXPERTS_PLAN
    # The parameters in checkpoints of transformers' Qwen3MoeForCausalLM.
    hf_tensors: ClassVar[Mapping[str, HFTensor]] = _without_feed_forward(Qwen3.hf_tensors) | _hf_experts(
        "model.layers.*.mlp", "gate_proj", "down_proj", "up_proj"
    )
