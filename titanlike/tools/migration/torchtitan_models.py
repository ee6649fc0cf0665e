"""Flavors of torchtitan's models as model sections of a recipe, and its data sets. `torchtitan.py` calls it."""

import json
import re
from typing import Any

from titanlike.config.base import UserError
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import config_class
from titanlike.tools.migration.conversion import Conversion

SOURCE_C4 = "hf://datasets/allenai/c4/en/c4-train.*.json.gz"
VALIDATION_C4 = "hf://datasets/allenai/c4/en/c4-validation.*.json.gz"

LLAMA3: dict[str, dict[str, Any]] = {
    "debugmodel": dict(
        dim=256, num_layers=6, num_heads=16, num_kv_heads=16, ffn_dim=768, vocab_size=2048, rope_scaling=8.0
    ),
    "8B": dict(size="3.1-8B"),
    "70B": dict(size="3.1-70B"),
    "405B": dict(size="3.1-405B"),
}
QWEN3: dict[str, dict[str, Any]] = {
    "debugmodel": dict(
        dim=256, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=128, ffn_dim=3072, vocab_size=2048, tied_head=True
    ),
    **{size: dict(size=size) for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
}
QWEN3_MOE: dict[str, dict[str, Any]] = {
    "debugmodel_moe": dict(
        dim=256, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=128, ffn_dim=768, vocab_size=2048, num_experts=64,
        experts_per_token=8,
    ),
    "30B-A3B": dict(size="30B-A3B"),
    "235B-A22B": dict(size="235B-A22B", rope_theta=5e6),
}  # fmt: skip
# Attention of the flavors with these endings: masks between documents.
MASKED = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
UNSUPPORTED = {
    "llama4": "its attention in chunks, blocks without RoPE and interleaved experts are no model of this toolkit",
    "llama4_iRoPE": "its attention in chunks and blocks without RoPE are no model of this toolkit",
    "deepseek_v3": "its jobs are not converted; write a recipe with model.name = 'deepseek_v3'",
    "gpt_oss": "its jobs are not converted; write a recipe with model.name = 'gpt_oss'",
    "flux": "it generates images; this toolkit trains language models",
    "vlm": "it has an image encoder; this toolkit trains language models",
    "kimi_k2_7": "it has an image encoder; this toolkit trains language models",
    "muse_glimmer": "its gated attention, centered norms and capped logits are no model of this toolkit",
    "qwen3_5": "its linear attention is no model of this toolkit",
}


def model_section(job: Conversion) -> TransformerConfig:
    """Sets the model of a job, and returns its config. Raises `UserError` if this toolkit does not have it."""
    name, flavor = job["model.name"], job["model.flavor"]
    if name in UNSUPPORTED:
        raise UserError(f'{job.source}: model.name = "{name}": {UNSUPPORTED[name]}')
    families = {"llama3": LLAMA3, "llama3_ft": LLAMA3, "qwen3": QWEN3 | QWEN3_MOE}
    if name not in families:
        raise UserError(
            f"{job.source}: model.name = {json.dumps(name)} is no model of torchtitan 0.2 that this toolkit has; those are llama3 "
            "and qwen3"
        )
    ending = next((ending for ending in MASKED if flavor.endswith(ending)), "") if name != "qwen3" else ""
    size = flavor.removesuffix(ending)
    if size not in families[name]:
        choices = ", ".join(families[name])
        raise UserError(
            f"{job.source}: model.flavor = {json.dumps(flavor)} is no flavor of {name} in torchtitan 0.2 ({choices}); "
            "if it is your own, write [model] of the recipe by hand (docs/config.md)"
        )
    family = "llama" if name != "qwen3" else "qwen3_moe" if size in QWEN3_MOE else "qwen3"
    fields = dict(families[name][size])
    published = config_class(family).sizes.get(fields.get("size", ""), {})
    longest = published.get("max_seq_len", config_class(family).__dataclass_fields__["max_seq_len"].default)  # type: ignore[attr-defined]
    if job["training.seq_len"] > longest:
        fields["max_seq_len"] = job["training.seq_len"]
    job.set("model.name", family, "model.name")
    for field, value in fields.items():
        job.set(f"model.{field}", value, "model.flavor")
    if ending:
        job.set(
            "data.document_masks",
            True,
            "model.flavor",
            comment="block_causal; position ids restart here at each document",
        )
    return job.checked(config_class(family), {**published, "name": family, **fields})


# Beginnings and parts of names, here and in 0.3.
NAMES_0_3 = {
    r"^output\.": "lm_head.",
    r"\.(w[qkv])\.": r".qkv_linear.\1.",
    r"feed_forward\.router\.expert_bias$": "moe.expert_bias_E",
    r"feed_forward\.router\.": "moe.router.gate.",
    r"feed_forward\.experts\.(w[13])$": r"moe.routed_experts.inner_experts.\1_EFD",
    r"feed_forward\.experts\.w2$": "moe.routed_experts.inner_experts.w2_EDF",
}


def name_in_0_3(name: str, *, is_fused: bool = False) -> str:
    """Returns the name of a parameter in torchtitan 0.3, in which queries, keys and values may be one matrix."""
    for pattern, replacement in NAMES_0_3.items():
        name = re.sub(pattern, replacement, name)
    return re.sub(r"qkv_linear\.w[qkv]", "qkv_linear.wqkv", name) if is_fused else name
