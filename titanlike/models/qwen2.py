"""Qwen2 and Qwen2.5 (dense) in plain PyTorch: the blocks of `models/llama.py` with biases of queries, keys and values."""

from collections.abc import Mapping
from typing import ClassVar

from titanlike.config.model_configs import Qwen2Config
from titanlike.models.hf_tensors import HFTensor
from titanlike.models.llama import HF_TENSORS, Llama
from titanlike.models.registry import register_model


@register_model(Qwen2Config)
class Qwen2(Llama):
    """A Qwen2 decoder. Tensor parallelism shards the biases like the outputs of their matrices, in the style `colwise`."""

    # The parameters in checkpoints of transformers' Qwen2ForCausalLM.
    hf_tensors: ClassVar[Mapping[str, HFTensor]] = HF_TENSORS | {
        f"layers.*.attention.w{part}.bias": HFTensor(f"model.layers.*.self_attn.{part}_proj.bias") for part in "qkv"
    }
