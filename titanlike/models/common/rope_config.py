"""RoPE in a `config.json` of transformers, which transformers 4 and 5 write in different forms. Does not import torch."""

from collections.abc import Mapping
from typing import Any

from titanlike.config.base import only_if
from titanlike.models.common.config import GLOBAL, LOCAL, equal, require

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


def rope_fields(
    values: Mapping[str, Any], supported: tuple[str, ...], default_theta: float, truncate: bool = True
) -> dict[str, Any]:
    """Returns the RoPE fields of a `config.json`, in which `truncate` of YaRN is the only supported value."""
    # Where both are present, transformers reads rope_scaling alone, also for theta.
    forms = [values.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    rope: Mapping[str, Any] = forms[0] or forms[1]
    theta = rope.get("rope_theta", values.get("rope_theta", default_theta))
    for form in (values, *forms):
        require(form, partial_rotary_factor=1.0)
        if not equal(form.get("rope_theta", theta), theta):
            raise ValueError(f"rope_theta = {form['rope_theta']!r}, but transformers reads rope_theta = {theta!r}")
    fields = {"rope_theta": theta}
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(rope, full_attention=None, sliding_attention=None)  # of types of blocks
    if kind not in supported:
        only = " and ".join(map(repr, supported)) + (" are" if len(supported) > 1 else " is")
        raise ValueError(f"the RoPE type {kind!r} is not supported; only {only}")
    if kind == "default":
        return fields
    if kind == "linear":
        return fields | {"rope_scaling": rope["factor"]}
    require(rope, **TURNS[kind])
    if kind == "yarn" and rope.get("truncate", True) != truncate:
        raise ValueError(f"truncate = {rope.get('truncate', True)!r} is not supported; only {truncate!r} is")
    if kind == "yarn" and not truncate:
        require(rope, attention_factor=None, mscale=None, mscale_all_dim=None)
    elif kind == "yarn":
        # The first scales cosines and sines, relative to the second, which scales the attention scores.
        require({"mscale": rope["mscale"]}, mscale=rope["mscale_all_dim"])
        require(rope, attention_factor=1.0)  # takes the place of that ratio
        fields["rope_mscale"] = rope["mscale_all_dim"]
    require(values, original_max_position_embeddings=rope["original_max_position_embeddings"])
    return fields | {
        "rope_scaling": rope["factor"],
        "rope_original_seq_len": rope["original_max_position_embeddings"],
    }


def rope_of_type(values: Mapping[str, Any], kind: str, theta_key: str, scaled: bool = True) -> dict[str, Any]:
    """Returns a `config.json` with the RoPE of one type of blocks, and whether `rope_scaling` applies to it."""
    nested = values.get("rope_parameters")
    if nested is not None and not {LOCAL, GLOBAL} & nested.keys():
        raise ValueError(f"rope_parameters = {nested!r} is not supported; only one for each type of blocks is")
    scaling = (values.get("rope_scaling") or {}) if scaled else {}
    theta = {"rope_theta": values[theta_key]} if theta_key in values else {}
    others = {key: value for key, value in values.items() if key != "rope_theta"}
    return others | theta | {"rope_parameters": {**((nested or {}).get(kind) or {}), **scaling}, "rope_scaling": None}


def odd_problems(key: str, size: int, remedy: str = "") -> list[str]:
    """Returns a message if RoPE cannot rotate this number of channels."""
    near = f"use {size - 1} or {size + 1}" if size > 1 else "use 2"
    return [f"{key} = {size} is odd, but RoPE rotates pairs; {remedy or near}"] if size % 2 else []


def yarn_problems(config: Any) -> list[str]:
    """Returns a message for each value of a `LlamaFamilyConfig` with which YaRN cannot work."""
    problems = []
    if config.rope_scaling > 1.0 and config.rope_theta <= 1.0:
        problems.append(f"model.rope_theta = {config.rope_theta}, but YaRN requires more than 1; use 10000.0")
    if config.rope_scaling < 1.0:
        problems.append(f"model.rope_scaling = {config.rope_scaling}, but YaRN lengthens sequences; use 1.0 or more")
    return problems
