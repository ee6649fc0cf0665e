"""Hugging Face folders: `config.json` and the index of their tensors. Nothing in a folder is trusted. Does not import torch."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from titanlike.config import UserError
from titanlike.config.base import LIMIT, MAX_PART, shown
from titanlike.models.common.config import TransformerConfig, equal

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Fields of a model config that describe its training or its limits, and not its tensors or what it computes from them.
NOT_COMPARED = ("name", "size", "dropout", "max_seq_len", "balance_loss", "num_mtp_layers", "mtp_loss_weight")

OBJECTS = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention")
INTEGERS = [
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
    *("max_position_embeddings", "original_max_position_embeddings", "head_dim", "sliding_window"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts", "n_shared_experts"),
    *("n_group", "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_embd", "n_layer", "n_head", "n_positions"),
    *("type_vocab_size", "local_attention", "global_attn_every_n_layers"),
    *("d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads"),
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
]  # fmt: skip
COUNTS = ["sliding_window_pattern", "_sliding_window_pattern", "first_k_dense_replace", "decoder_start_token_id"]
NUMBERS = [
    *("rope_theta", "rope_local_base_freq", "factor", "rms_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar"),
    *("final_logit_softcapping", "attn_logit_softcapping", "global_rope_theta", "local_rope_theta"),
    *("routed_scaling_factor", "mscale", "mscale_all_dim"),
]


def _is_number(value: Any, lowest: int, types: tuple[type, ...]) -> bool:
    return type(value) in types and lowest <= value <= LIMIT


# Keys of a config.json, what their values are if they are not null, and a test of it.
KEY_TYPES: tuple[tuple[Sequence[str], str, Callable[[Any], bool]], ...] = (
    (INTEGERS, f"an integer from 1 to {LIMIT:,}", lambda value: _is_number(value, 1, (int,))),
    (COUNTS, f"an integer from 0 to {LIMIT:,}", lambda value: _is_number(value, 0, (int,))),
    (NUMBERS, f"a positive number up to {LIMIT:,}", lambda value: _is_number(value, 0, (int, float)) and value > 0),
    (("tie_word_embeddings", "norm_topk_prob"), "true or false", lambda value: type(value) is bool),
    (OBJECTS, "an object", lambda value: isinstance(value, dict)),
    (("layer_types",), "a list", lambda value: isinstance(value, list)),
)


def is_hf_folder(path: Path) -> bool:
    """Whether a path is a Hugging Face folder."""
    return (path / CONFIG).exists()


def fields_of(config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of a config for a recipe: the published size and what differs from it, or all of them."""
    if not config.sizes.get(config.size):
        return dataclasses.asdict(cast(Any, config))
    named = {"name": config.name, "size": config.size}
    published = type(config)(**{**config.sizes[config.size], **named})
    fields = dataclasses.asdict(cast(Any, config))
    return named | {key: value for key, value in fields.items() if not equal(value, getattr(published, key))}


def read_config(path: Path, config_classes: tuple[type[TransformerConfig], ...]) -> TransformerConfig:
    """Returns the config of the model in a folder, or of a `config.json`. Raises `UserError` if none of the classes "
    "describes it."""
    file = path if path.is_file() else path / CONFIG
    values = read_json(file)
    architectures = values.get("architectures")
    found = architectures[0] if isinstance(architectures, list) and architectures else None
    known = {one.hf_architecture: one for one in config_classes if one.hf_architecture}
    if not isinstance(found, str) or found not in known:
        raise UserError(
            f"{file}: architectures = {shown(json.dumps(architectures))} is not supported; choose a model of "
            f"{', '.join(sorted(known))}"
        )
    quantization = values.get("quantization_config")
    if quantization and not (isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"):
        raise UserError(
            f"{file}: the weights are quantized, and not in MXFP4; use a folder with float32, float16 or bfloat16 weights"
        )
    _check_types(file, values)
    try:
        config = known[found].from_hugging_face(values)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{file} has no {error}; add it, or download the file again") from None
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"{file}: {shown(str(error))}; correct it, or choose another model") from None
    except (TypeError, AttributeError):  # a null where the architecture needs a value
        raise UserError(f"{file}: a value that this architecture needs is null; download the file again") from None
    if problems := config.problems():
        raise UserError(f"{file}: {problems[0]}")
    return config


def _check_types(file: Path, values: dict[str, Any]) -> None:
    """Raises `UserError` for a value of a `config.json`, or of an object in it, that is not of the type that its key has."""
    for key, value in values.items():
        if value is None:
            continue
        for keys, expected, is_valid in KEY_TYPES:
            if key in keys and not is_valid(value):
                text = shown(json.dumps(value))
                raise UserError(f"{file}: {key} = {text} is not {expected}; correct it, or download the file again")
        if key in OBJECTS:
            _check_types(file, value)


def config_problems(
    initial: str,
    found: TransformerConfig,
    model: TransformerConfig,
    allow_changed: Sequence[str] = (),
    *,
    key: str = "checkpoint.initial",
) -> list[str]:
    """Returns what a recipe's model, or its teacher, has otherwise than the weights that the `key` of the recipe names."""
    remedy = "; `titanlike import` writes a recipe with the model of a folder"
    section = "teacher" if key == "distillation.teacher" else "model"
    if type(found) is not type(model):
        return [f"{key} = {initial!r} is a {found.name} model, but {section}.name = {model.name!r}{remedy}"]
    fields = [field.name for field in dataclasses.fields(model) if field.name not in NOT_COMPARED]  # type: ignore[arg-type]
    different = [name for name in fields if not equal(getattr(found, name), getattr(model, name))]
    return [
        f"{key} = {initial!r} has {name} = {getattr(found, name)!r}, but {section}.{name} = {getattr(model, name)!r}{remedy}"
        for name in different
        if f"{section}.{name}" not in allow_changed
    ]


def tensor_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder."""
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return [folder / SINGLE]
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        raise UserError(
            f"{folder} has no {SINGLE} and no {INDEX}"
            + (f"; {pickles[0]} is a pickle, which can run code: convert it to safetensors" if pickles else "")
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map is not a table of tensors and files")
    for name in weight_map.values():
        is_name = isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)
        if not is_name or len(name.encode(errors="replace")) > MAX_PART:
            raise UserError(f"{index}: {shown(json.dumps(name))} is not the name of a file in the folder")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} lacks {shown(missing[0])}, one of {len(names)} files that {INDEX} names; download it again"
        )
    return [folder / name for name in names]


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file."""
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} does not contain an object")
    return values
