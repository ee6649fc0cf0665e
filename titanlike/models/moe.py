"""Mixture-of-experts models in plain PyTorch: the blocks of `models/llama.py`, whose feed-forward layer is that of
`models/experts.py`."""

from collections.abc import Mapping
from typing import ClassVar

from titanlike.config.model_configs import MixtralConfig, MoeConfig, Qwen3MoeConfig
from titanlike.models.llama import TENSOR_PLAN, Llama
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


def _without_feed_forward(plan: Mapping[str, str]) -> dict[str, str]:
    return {name: style for name, style in plan.items() if not name.startswith(FEED_FORWARD)}


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


@register_model(Qwen3MoeConfig)
class Qwen3Moe(MoeModel):
    """A Qwen3-MoE decoder: norms of queries and keys as in Qwen3."""

    tensor_plan: ClassVar[Mapping[str, str]] = _without_feed_forward(Qwen3.tensor_plan) | EXPERTS_PLAN
