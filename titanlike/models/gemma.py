"""Gemma 2 and Gemma 3 (text) in plain PyTorch: the blocks of `models/llama.py` with the options of their configs."""

from collections.abc import Mapping
from typing import ClassVar

from titanlike.config.model_configs import Gemma2Config, Gemma3Config
from titanlike.models.hf_tensors import HFTensor
from titanlike.models.llama import HF_TENSORS, TENSOR_PLAN, Llama
from titanlike.models.qwen3 import Qwen3
from titanlike.models.registry import register_model

# Each tensor-parallel rank has the full width of the tokens that it normalizes.
POST_NORM_PLAN = {
    "layers.*.post_attention_norm": "sequence_parallel",
    "layers.*.post_ffn_norm": "sequence_parallel",
}

# Where the names of the norms differ from those of Llama: `post_attention_layernorm` is a norm of another tensor there.
HF_NORMS = {
    "layers.*.post_attention_norm.weight": HFTensor("model.layers.*.post_attention_layernorm.weight"),
    "layers.*.ffn_norm.weight": HFTensor("model.layers.*.pre_feedforward_layernorm.weight"),
    "layers.*.post_ffn_norm.weight": HFTensor("model.layers.*.post_feedforward_layernorm.weight"),
}


@register_model(Gemma2Config)
class Gemma2(Llama):
    """A Gemma 2 decoder."""

    tensor_plan: ClassVar[Mapping[str, str]] = TENSOR_PLAN | POST_NORM_PLAN
    # The parameters in checkpoints of transformers' Gemma2ForCausalLM.
    hf_tensors: ClassVar[Mapping[str, HFTensor]] = HF_TENSORS | HF_NORMS


@register_model(Gemma3Config)
class Gemma3(Llama):
    """A Gemma 3 decoder of text: norms of queries and keys as in Qwen3."""

    tensor_plan: ClassVar[Mapping[str, str]] = {**Qwen3.tensor_plan, **POST_NORM_PLAN}
    # The parameters in checkpoints of transformers' Gemma3ForCausalLM.
    hf_tensors: ClassVar[Mapping[str, HFTensor]] = {**Qwen3.hf_tensors, **HF_NORMS}
