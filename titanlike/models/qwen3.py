"""Qwen3 (dense) in plain PyTorch: the blocks of `models/llama.py` with an RMSNorm over each head of queries and keys."""

from collections.abc import Mapping
from typing import ClassVar

from titanlike.config.model_configs import Qwen3Config
from titanlike.models.hf_tensors import HFTensor
from titanlike.models.llama import HF_TENSORS, TENSOR_PLAN, Llama
from titanlike.models.registry import register_model


@register_model(Qwen3Config)
class Qwen3(Llama):
    """A Qwen3 decoder."""

    # Tensor-parallel ranks replicate these weights and apply them to their own heads.
    tensor_plan: ClassVar[Mapping[str, str]] = TENSOR_PLAN | {
        "layers.*.attention.q_norm": "qk_norm",
        "layers.*.attention.k_norm": "qk_norm",
    }
    # The parameters in checkpoints of transformers' Qwen3ForCausalLM.
    hf_tensors: ClassVar[Mapping[str, HFTensor]] = HF_TENSORS | {
        "layers.*.attention.q_norm.weight": HFTensor("model.layers.*.self_attn.q_norm.weight"),
        "layers.*.attention.k_norm.weight": HFTensor("model.layers.*.self_attn.k_norm.weight"),
    }
