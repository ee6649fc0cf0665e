"""Configs of the model architectures: fields, published sizes, parameter and FLOP counts. No module imports torch."""

from titanlike.config.model_configs.gpt import GPT_SIZES as GPT_SIZES
from titanlike.config.model_configs.gpt import GPTConfig as GPTConfig
from titanlike.config.model_configs.llama import LLAMA_SIZES as LLAMA_SIZES
from titanlike.config.model_configs.llama import LlamaConfig as LlamaConfig
from titanlike.config.model_configs.transformer import TransformerConfig as TransformerConfig
