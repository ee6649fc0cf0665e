"""Tiny transformers models for `titanlike verify`, under their own tensor-parallel plans."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64,
)  # fmt: skip
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def qwen3_tied() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS))


def gpt_oss() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, rope_parameters=rope))


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, SIZES["vocab_size"], (4, 16))
    return {"input_ids": tokens, "labels": tokens}
