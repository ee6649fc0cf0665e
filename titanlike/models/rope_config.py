"""RoPE in a `config.json` of transformers, which transformers 4 and 5 write in different forms. Does not import torch."""

from collections.abc import Mapping
from typing import Any

from titanlike.config.base import only_if
from titanlike.models.base_config import require

SCALES_ROPE = only_if(lambda factor: factor != 1.0, "rope_scaling", remedy="set {0}")

# Turns in the original length between which a RoPE frequency is partly scaled.
TURNS: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_slow": 1, "beta_fast": 32},
}


def rope_scaling(config: Any) -> dict[str, Any]:
    """Returns what describes the RoPE scaling of a `LlamaFamilyConfig`; empty if there is none."""
    if config.rope_scaling == 1.0:
        return {}
    kind = config.rope_scaling_type
    scaling: dict[str, Any] = {"rope_type": kind, "factor": config.rope_scaling}
    if kind == "linear":
        return scaling
    if kind == "yarn" and config.has_field("rope_mscale"):
        scaling |= {"mscale": config.rope_mscale, "mscale_all_dim": config.rope_mscale}
    elif kind == "yarn":
        scaling["truncate"] = config.rope_truncate
    return scaling | TURNS[kind] | {"original_max_position_embeddings": config.rope_original_seq_len}


def rope_fields(values: Mapping[str, Any], supported: tuple[str, ...], truncate: bool = True) -> dict[str, Any]:
    """Returns the RoPE fields of a `config.json`, in which `truncate` of YaRN is the only supported value."""
    forms = [values.get(key) for key in ("rope_parameters", "rope_scaling")]
    rope: Mapping[str, Any] = next((form for form in forms if form), {})
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    if values.get("rope_theta", theta) != theta:
        raise ValueError(f"rope_theta = {values['rope_theta']!r}, but rope_parameters has rope_theta = {theta!r}")
    fields = {"rope_theta": float(theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in supported:
        only = " and ".join(map(repr, supported)) + (" are" if len(supported) > 1 else " is")
        raise ValueError(f"the RoPE type {kind!r} is not supported; only {only}")
    if kind == "default":
        return fields
    if kind == "linear":
        return fields | {"rope_scaling": float(rope["factor"])}
    require(rope, **TURNS[kind])
    if kind == "yarn" and rope.get("truncate", True) != truncate:
        raise ValueError(f"truncate = {rope.get('truncate', True)!r} is not supported; only {truncate!r} is")
    if kind == "yarn" and not truncate:
        require(rope, attention_factor=None, mscale=None, mscale_all_dim=None)
    elif kind == "yarn":
        # The first scales cosines and sines, relative to the second, which scales the attention scores.
        require(rope, mscale=rope["mscale_all_dim"])
        fields["rope_mscale"] = float(rope["mscale_all_dim"])
    return fields | {
        "rope_scaling": float(rope["factor"]),
        "rope_original_seq_len": rope["original_max_position_embeddings"],
    }


def yarn_problems(config: Any) -> list[str]:
    """Returns a message for each value of a `LlamaFamilyConfig` with which YaRN cannot work."""
    problems = []
    if config.rope_scaling > 1.0 and config.rope_theta <= 1.0:
        problems.append(f"model.rope_theta = {config.rope_theta}, but YaRN requires more than 1; use 10000.0")
    if config.rope_scaling < 1.0:
        problems.append(f"model.rope_scaling = {config.rope_scaling}, but YaRN lengthens sequences; use 1.0 or more")
    return problems
