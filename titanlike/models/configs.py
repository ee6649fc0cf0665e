"""All model configs. Does not import torch."""

from typing import get_args

from titanlike.models.base_config import TransformerConfig
from titanlike.models.gemma_config import Gemma2Config, Gemma3Config
from titanlike.models.gpt_config import GPTConfig
from titanlike.models.llama_config import LlamaConfig
from titanlike.models.moe_config import MixtralConfig, Qwen3MoeConfig
from titanlike.models.qwen2_config import Qwen2Config
from titanlike.models.qwen3_config import Qwen3Config

ModelConfig = (
    LlamaConfig | Qwen2Config | Qwen3Config | Qwen3MoeConfig | MixtralConfig | Gemma2Config | Gemma3Config | GPTConfig
)
CONFIGS: tuple[type[TransformerConfig], ...] = get_args(ModelConfig)
