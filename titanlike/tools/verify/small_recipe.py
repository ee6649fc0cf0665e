"""A small version of a recipe, with which `titanlike verify` compares layouts on a CPU. Does not import torch."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titanlike.config.distill import RANDOM
from titanlike.config.layout import SCHEDULES
from titanlike.config.sections import Data, Float8, Tokenizer, is_chat_source
from titanlike.tools.programs import ONLY_STEPS, toml

# Sections whose changes are not printed.
NOT_SHOWN = ("run", "checkpoint", "validation", "evaluation", "sample", "metrics")


def fitting_batch(parallelism: dict[str, Any], processes: int) -> dict[str, Any]:
    """Returns the smallest batch of two or more micro-batches that the layout and its pipeline schedule support."""
    num_data_ranks = processes // math.prod(parallelism[name] for name in ("tensor", "context", "pipeline"))
    return {
        "training.batch_ramp": [],
        "training.global_batch_size": num_data_ranks * max(2, _num_stages(parallelism)),
        "training.local_batch_size": 1,
    }


def _num_stages(parallelism: dict[str, Any]) -> int:
    schedule = SCHEDULES[parallelism["pipeline_schedule"]]
    per_rank = parallelism["pipeline_stages"] or schedule.stages_per_rank
    split = parallelism.get("pipeline_split", [])
    return len(split) or (parallelism["pipeline"] * per_rank if parallelism["pipeline"] > 1 else 1)


def float8_off(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the overrides that disable float8, if it is enabled. Float8 amplifies a rounding difference to 1/16 of a value:
    layouts cannot be compared through it."""
    return _changed_keys("float8", Float8(), values)


def shrink(values: dict[str, Any], processes: int, steps: int) -> dict[str, Any]:
    """Returns overrides that make a resolved recipe run within seconds on a CPU and keep it divisible by the layout."""
    model, parallelism, training = (values[name] for name in ("model", "parallelism", "training"))
    tensor, context, pipeline = (parallelism[name] for name in ("tensor", "context", "pipeline"))
    optimizer, split, stages = (
        values.get("optimizer", {}),
        parallelism.get("pipeline_split", []),
        _num_stages(parallelism),
    )
    small = _small_model(model, parallelism, stages)
    has_pairs = "preference" in values
    masked = values["data"].get("document_masks", False) or is_chat_source(values["data"].get("source", ""))
    changes = {f"model.{key}": value for key, value in small.items()}
    if "teacher" in values:
        changes |= {f"teacher.{key}": value for key, value in _small_model(values["teacher"], parallelism, 2).items()}
        changes |= {"distillation.teacher": RANDOM, "distillation.top_k": 0}
    pieces = tensor * (2 * context if context > 1 else 1)
    changes |= {
        **_changed_keys("tokenizer", Tokenizer(), values),
        **_changed_keys("data", Data(source="synthetic", document_masks=masked), values),
        "data.chat_template": "",
        "data.fields": [],
        "training.steps": steps,
        "training.seq_len": min(training["seq_len"], -(-(256 if has_pairs else 32) // pieces) * pieces),
        **fitting_batch(parallelism, processes),
        "training.compute_dtype": "float32",
        "training.master_dtype": "float32",
        "training.reduce_dtype": "float32",
        "training.matmul_precision": "highest",
        "training.attention": "auto",
        "training.non_finite": "stop",
        # Adam normalizes gradients: with the usual eps, rounding noise around 0 becomes a full step.
        "optimizer.eps": max(optimizer.get("eps", 0.0), 1e-4),
        "optimizer.lr": max(optimizer.get("lr", 0.0), 1e-2),  # a wrong gradient must show within a few steps
        "compile.mode": "none",  # compilation would dominate the run time
        **float8_off(values),
        "optimizer.state_dtype": "full",
        "optimizer.stochastic_rounding": False,
        "schedule.warmup_steps": min(values["schedule"].get("warmup_steps", 0), 2, steps),
        "schedule.decay_ratio": 0.0,
        "parallelism.cpu_offload": False,
        "activation_checkpoint.offload": False,
        "parallelism.async_tensor_parallel": False,
        "run.device": "cpu",
        **ONLY_STEPS,
        "checkpoint.initial": "",  # the small model has other shapes
        "checkpoint.enabled": True,
        "checkpoint.interval": 0,
        "checkpoint.dir": "",  # not where the runs of the recipe are
        "checkpoint.resume_from": 0,
        "validation.interval": steps,
        "validation.batches": 2,
        "evaluation.tasks": [],
        "evaluation.data": [],
        "metrics.interval": 1,
        "metrics.prometheus": "",
    }
    if has_pairs:
        changes |= {"data.source": "synthetic_preference", "data.path": "", "data.mixture": [], "data.weights": []}
        changes["data.document_masks"] = False  # pairs are separated in any case
    changes |= {"seq2seq.target_len": 0, "seq2seq.source_prefix": "", "mlm.mask_token": ""}
    if "lora" in values:
        changes["lora.layers"] = _present(values["lora"].get("layers", []), changes["model.num_layers"])
    groups = [
        {**group, "pattern": _present([group["pattern"]], changes["model.num_layers"])[0]}
        for group in optimizer.get("groups", [])
        if isinstance(group, dict)
    ]
    if any(group not in optimizer.get("groups", []) for group in groups):
        changes["optimizer.groups"] = [group for index, group in enumerate(groups) if group not in groups[:index]]
    if split:
        changes["parallelism.pipeline_split"] = [1] * (stages - 1) + [changes["model.num_layers"] - stages + 1]
    checkpoint_mode = values["activation_checkpoint"]["mode"]
    if checkpoint_mode == "memory_budget" or (
        checkpoint_mode == "selective" and SCHEDULES[parallelism["pipeline_schedule"]].splits_backward and pipeline > 1
    ):
        changes["activation_checkpoint.mode"] = "full"  # both require the compiler here
    # A program of one's own may have other keys in its sections.
    return {
        key: value for key, value in changes.items() if key.partition(".")[2] in values.get(key.partition(".")[0], {})
    }


def print_changes(values: dict[str, Any], smaller: dict[str, Any]) -> None:
    """Prints what `shrink` changes of a recipe."""
    print("changed for the comparison, to run on this machine and to expose wrong gradients:")
    for key, value in smaller.items():
        before = values[key.partition(".")[0]].get(key.partition(".")[2])
        if before != value and key.partition(".")[0] not in NOT_SHOWN:
            print(f"  {key:<28} {toml(before)} -> {toml(value)}")


def _present(patterns: Sequence[str], num_layers: int) -> list[str]:
    """Returns patterns of parameters with the numbers of blocks that a small model has."""

    def rename(match: re.Match[str]) -> str:
        return f"layers.{int(match[1]) % num_layers}"

    return list(dict.fromkeys(re.sub(r"\blayers\.(\d+)", rename, pattern) for pattern in patterns))


def _small_model(model: dict[str, Any], parallelism: dict[str, Any], stages: int) -> dict[str, Any]:
    """Returns the sizes of a small model of an architecture."""
    tensor = parallelism["tensor"]
    heads, kv_heads = model["num_heads"], model.get("num_kv_heads", model["num_heads"])
    small_kv = min(kv_heads, max(tensor, 2))  # one or two per rank
    small_heads = min(heads, small_kv * min(heads // kv_heads, 2))
    dim = min(model["dim"], 16 * small_heads)
    # Several experts in each group, and more groups than those that a token's experts are in.
    groups = min(model.get("num_expert_groups", 1), 4)
    unit = math.lcm(parallelism["expert"], groups)
    experts = min(model.get("num_experts", 0), unit * -(-8 // unit))
    groups_per_token = min(model.get("groups_per_token", 1), max(1, groups - 2))
    small: dict[str, Any] = {
        # Stages of unequal size, and of a mixture of experts a block that has some.
        "num_layers": min(model["num_layers"], max(stages + 1, 2)),
        "num_dense_layers": min(model.get("num_dense_layers", 0), 1),
        "num_encoder_layers": 1,
        "num_heads": small_heads,
        "num_kv_heads": small_kv,
        "dim": dim,
        "head_dim": min(model.get("head_dim", 0), 24),  # not dim / num_heads, if it is a field
        "ffn_dim": min(model.get("ffn_dim", 0), dim if "num_experts" in model else 3 * dim),
        "dense_ffn_dim": min(model.get("dense_ffn_dim", 0), 3 * dim),
        "num_experts": experts,
        "experts_per_token": min(model.get("experts_per_token", 0), 4, experts // groups * groups_per_token),
        "num_expert_groups": groups,
        "groups_per_token": groups_per_token,
        "q_lora_rank": min(model.get("q_lora_rank", 0), 24),
        "kv_lora_rank": min(model.get("kv_lora_rank", 0), 16),
        "qk_nope_head_dim": min(model.get("qk_nope_head_dim", 0), 16),
        "qk_rope_head_dim": min(model.get("qk_rope_head_dim", 0), 8),
        "v_head_dim": min(model.get("v_head_dim", 0), 16),
        # A window that hides some of 32 tokens, and a block with each kind of attention.
        "sliding_window": min(model.get("sliding_window", 0), 16),
        "sliding_window_pattern": min(model.get("sliding_window_pattern", 0), 2),
        "global_attention_every": min(model.get("global_attention_every", 0), 2),
        "vocab_size": min(model["vocab_size"], math.lcm(64, tensor) * -(-320 // math.lcm(64, tensor))),
    }
    for name in ("ffn_dim", "dense_ffn_dim"):
        if small[name] % tensor:
            small[name] = model[name]
    unused = [] if small["sliding_window"] else ["sliding_window_pattern", "global_attention_every"]
    unused += [] if small["num_dense_layers"] else ["dense_ffn_dim"]
    return {key: value for key, value in small.items() if key in model and key not in unused}


def _changed_keys(name: str, section: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a section of the recipe that differ from `section`."""
    wanted = json.loads(json.dumps(asdict(section)))
    return {f"{name}.{key}": value for key, value in wanted.items() if values.get(name, {}).get(key, value) != value}
