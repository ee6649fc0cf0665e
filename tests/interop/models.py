"""Models with weights of a trained model's size, and their Hugging Face folders."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from titanlike.checkpoint.format import ShardRange
from titanlike.config.sections import Tokenizer
from titanlike.interop.export import export
from titanlike.interop.weights import Weights, load_weights, open_weights
from titanlike.models.bert.config import BertConfig
from titanlike.models.common.config import TransformerConfig
from titanlike.models.deepseek.config import DeepseekV2Config, DeepseekV3Config
from titanlike.models.gemma.config import Gemma2Config, Gemma3Config, GemmaConfig
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.mistral.config import MistralConfig
from titanlike.models.modernbert.config import ModernBertConfig
from titanlike.models.moe.config import MixtralConfig, Qwen3MoeConfig
from titanlike.models.olmo2.config import Olmo2Config
from titanlike.models.phi3.config import Phi3Config
from titanlike.models.qwen.config import Qwen2Config, Qwen3Config
from titanlike.models.registry import build_model
from titanlike.models.smollm3.config import SmolLM3Config
from titanlike.models.t5.config import T5Config

# What config.json has in published folders, in the form of transformers 4, with the size and the number of parameters.
PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())

SIZES: dict[str, Any] = dict(dim=64, num_layers=3, vocab_size=301, max_seq_len=256)
GROUPED: dict[str, Any] = SIZES | dict(num_heads=4, num_kv_heads=2, ffn_dim=112)
# The window is shorter than the sequences, and the caps bound the scores and the logits. bfloat16 rounds the root of the dimension.
GEMMA: dict[str, Any] = GROUPED | dict(dim=72, head_dim=24, query_scalar=20.0, sliding_window=40)
LLAMA = LlamaConfig(**GROUPED | dict(num_heads=8))
QWEN3_MOE = Qwen3MoeConfig(**GROUPED | dict(head_dim=24, ffn_dim=40, num_experts=6, experts_per_token=3))
# Groups of experts limit the selection, and YaRN scales some frequencies, keeps some, and interpolates between.
DEEPSEEK: dict[str, Any] = SIZES | dict(
    num_heads=4,
    dense_ffn_dim=112,
    ffn_dim=40,
    num_experts=8,
    experts_per_token=3,
    num_expert_groups=4,
    groups_per_token=2,
    kv_lora_rank=40,
    qk_nope_head_dim=20,
    qk_rope_head_dim=16,
    v_head_dim=28,
)
YARN: dict[str, Any] = dict(rope_scaling=8.0, rope_original_seq_len=200)  # fmt: skip
# Widths that MXFP4 has blocks of; the window is shorter than the sequences.
GPT_OSS = GptOssConfig(
    **GROUPED | YARN | dict(head_dim=24, ffn_dim=96, num_experts=6, experts_per_token=3, sliding_window=40)
)
CONFIGS: dict[str, TransformerConfig] = {
    "grouped-query": LLAMA,
    "tied": dataclasses.replace(LLAMA, tied_head=True, norm_eps=1e-3),
    "theta": dataclasses.replace(LLAMA, rope_theta=10000.0, num_kv_heads=8),
    # The lengths are scaled down with the model: all three branches of the scaling take part.
    "Llama 3.1": dataclasses.replace(LLAMA, rope_scaling=8.0, rope_original_seq_len=64),
    "Llama 3.2": dataclasses.replace(LLAMA, rope_scaling=32.0, rope_original_seq_len=32, tied_head=True),
    "Mistral": MistralConfig(**GROUPED, head_dim=24),
    "Mistral, window": MistralConfig(**GROUPED, head_dim=24, sliding_window=40),
    "Phi-3": Phi3Config(**GROUPED, sliding_window=40),
    "Phi-4": Phi3Config(**GROUPED, rope_theta=250000.0),
    "SmolLM3": SmolLM3Config(**GROUPED | dict(num_layers=5), no_rope_every=2),
    "SmolLM3, all with RoPE": SmolLM3Config(**GROUPED, no_rope_every=0),
    "OLMo-2": Olmo2Config(**GROUPED),
    "Qwen2": Qwen2Config(**GROUPED),
    "Qwen3": Qwen3Config(**GROUPED, head_dim=24),
    "Gemma 2": Gemma2Config(**GEMMA, attention_soft_cap=5.0, logit_soft_cap=4.0),
    "Gemma 3": Gemma3Config(**GEMMA | dict(num_layers=4, sliding_window_pattern=3, rope_scaling=8.0)),
    "Qwen3-MoE": QWEN3_MOE,
    "Qwen3-MoE, router not normalized": dataclasses.replace(QWEN3_MOE, normalize_router=False),
    "Mixtral": MixtralConfig(**GROUPED | dict(ffn_dim=40, num_experts=5)),
    "DeepSeek-V2": DeepseekV2Config(**DEEPSEEK | YARN | dict(q_lora_rank=36, num_dense_layers=2, router_scale=0.5)),
    "DeepSeek-V2-Lite": DeepseekV2Config(
        **DEEPSEEK | dict(num_expert_groups=1, groups_per_token=1, num_shared_experts=2)
    ),
    "DeepSeek-V3": DeepseekV3Config(**DEEPSEEK | YARN | dict(rope_mscale=0.5)),
    "Moonlight": DeepseekV3Config(
        **DEEPSEEK | dict(q_lora_rank=0, num_expert_groups=1, groups_per_token=1, norm_eps=1e-3)
    ),
    "GPT-OSS": GPT_OSS,
    "GPT-OSS, no window": dataclasses.replace(GPT_OSS, sliding_window=0, rope_scaling=1.0, rope_original_seq_len=4096),
    "GPT-2": GPTConfig(**SIZES, num_heads=4),
}

ENCODERS: dict[str, TransformerConfig] = {
    "BERT": BertConfig(**SIZES, num_heads=4, ffn_dim=112, num_token_types=3),
    # The window is shorter than the sequences; the pattern ends within a period.
    "ModernBERT": ModernBertConfig(**SIZES | dict(num_layers=5), num_heads=4, ffn_dim=112, sliding_window=40),
    "ModernBERT, pattern": ModernBertConfig(
        **SIZES, num_heads=8, ffn_dim=112, sliding_window=14, global_attention_every=2, rope_theta=5000.0,
        rope_local_theta=300.0,
    ),
    "ModernBERT, no window": ModernBertConfig(**SIZES, num_heads=4, ffn_dim=112, sliding_window=0),
}  # fmt: skip


# Heads are not dim / num_heads wide, and the decoder has more blocks. Distances are in all buckets.
T5 = T5Config(
    dim=64, num_layers=5, num_encoder_layers=2, num_heads=4, head_dim=24, ffn_dim=112, vocab_size=301, max_seq_len=256,
    relative_attention_num_buckets=16, relative_attention_max_distance=40,
)  # fmt: skip


class MemoryWeights(Weights):
    """The weights of a model in memory."""

    def __init__(self, model: nn.Module, config: TransformerConfig, tokenizer: Tokenizer) -> None:
        self.path, self.config, self.tokenizer = Path("memory"), config, tokenizer
        self.parameters = dict(model.named_parameters())

    def dtype(self, name: str) -> torch.dtype:
        return self.parameters[name].dtype

    def fingerprint(self) -> str:
        return "memory"

    def fill(self, name: str, target: Tensor, shard_range: ShardRange) -> None:
        slices = zip(shard_range.offset, shard_range.shape, strict=True)
        target.copy_(self.parameters[name].data[tuple(slice(start, start + size) for start, size in slices)])


def model_of(config: TransformerConfig, seed: int = 0) -> nn.Module:
    """Returns a model whose weights are large enough that an error in any of them moves the logits."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "embeddings" in name or "expert_bias" in name else 2.0 / parameter.shape[-1] ** 0.5
            if isinstance(config, T5Config) and name.endswith("wq.weight"):  # scores are not scaled
                scale /= config.head_dim**0.5
            values = torch.randn(parameter.shape, generator=generator)
            one = 0.0 if isinstance(config, GemmaConfig) else 1.0
            parameter.copy_(one + 0.2 * values if name.endswith("norm.weight") else scale * values)
    return model


def export_model(model: nn.Module, config: TransformerConfig, folder: Path, **options: Any) -> Path:
    """Exports a model with the byte tokenizer."""
    export(MemoryWeights(model, config, Tokenizer()), folder, **options)
    return folder


def assert_equal_weights(folder: Path, model: nn.Module, config: TransformerConfig) -> None:
    """Reads a folder of transformers, which has the weights of a model to the bit."""
    weights = open_weights(folder)
    assert weights.config == config
    again = build_model(config)
    load_weights(again, weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def changed_tensors(folder: Path, change: Any) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
