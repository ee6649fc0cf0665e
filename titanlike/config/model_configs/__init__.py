"""Configs of the model architectures: fields, published sizes, parameter and FLOP counts. No module imports torch."""

from typing import get_args

from titanlike.config.model_configs.gemma import GEMMA2_SIZES as GEMMA2_SIZES
from titanlike.config.model_configs.gemma import GEMMA3_SIZES as GEMMA3_SIZES
from titanlike.config.model_configs.gemma import Gemma2Config as Gemma2Config
from titanlike.config.model_configs.gemma import Gemma3Config as Gemma3Config
from titanlike.config.model_configs.gemma import GemmaConfig as GemmaConfig
from titanlike.config.model_configs.gpt import GPT_SIZES as GPT_SIZES
from titanlike.config.model_configs.gpt import GPTConfig as GPTConfig
from titanlike.config.model_configs.llama import LLAMA_SIZES as LLAMA_SIZES
from titanlike.config.model_configs.llama import LlamaConfig as LlamaConfig
from titanlike.config.model_configs.llama_family import LlamaFamilyConfig as LlamaFamilyConfig
from titanlike.config.model_configs.moe import MIXTRAL_SIZES as MIXTRAL_SIZES
from titanlike.config.model_configs.moe import QWEN3_MOE_SIZES as QWEN3_MOE_SIZES
from titanlike.config.model_configs.moe import MixtralConfig as MixtralConfig
from titanlike.config.model_configs.moe import MoeConfig as MoeConfig
from titanlike.config.model_configs.moe import Qwen3MoeConfig as Qwen3MoeConfig
from titanlike.config.model_configs.qwen2 import QWEN2_SIZES as QWEN2_SIZES
from titanlike.config.model_configs.qwen2 import Qwen2Config as Qwen2Config
from titanlike.config.model_configs.qwen3 import QWEN3_SIZES as QWEN3_SIZES
from titanlike.config.model_configs.qwen3 import Qwen3Config as Qwen3Config
from titanlike.config.model_configs.transformer import TransformerConfig as TransformerConfig

ModelConfig = (
    LlamaConfig | Qwen2Config | Qwen3Config | Qwen3MoeConfig | MixtralConfig | Gemma2Config | Gemma3Config | GPTConfig
)
CONFIGS: tuple[type[TransformerConfig], ...] = get_args(ModelConfig)
