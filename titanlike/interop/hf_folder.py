"""Hugging Face folders: `config.json` and the index of their tensors. Nothing in a folder is trusted. Does not import torch."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from titanlike.config import UserError
from titanlike.config.base import MAX_PART, shown
from titanlike.models.common.config import MAX_LAYERS, TransformerConfig, equal

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Fields of a model config that describe its training or its limits, and not its tensors or what it computes from them.
NOT_COMPARED = ("name", "size", "dropout", "max_seq_len", "balance_loss", "num_mtp_layers", "mtp_loss_weight")


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
    """Returns the config of the model in a folder, or of a `config.json`. Raises `UserError` if none of the classes describes it,
    or if the weights of a folder are quantized in a format that is not read."""
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
    if (quantization := values.get("quantization_config")) and file != path:
        _check_quantization(file, quantization)
    layers = values.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:  # before lists of this length are made
        raise UserError(f"{file}: num_hidden_layers = {layers} is more than {MAX_LAYERS:,}; download the file again")
    try:
        config = known[found].from_hugging_face(values)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{file} has no {error}; add it, or download the file again") from None
    except ValueError as error:
        raise UserError(f"{file}: {shown(str(error))}; correct it, or choose another model") from None
    except (TypeError, AttributeError, ArithmeticError):
        raise UserError(
            f"{file}: a value that this architecture needs is null, 0 or of another type; download the file again"
        ) from None
    if problems := config.problems():
        raise UserError(f"{file}: {problems[0]}")
    return config


def _check_quantization(file: Path, quantization: Any) -> None:
    """Raises `UserError` unless `quantized.py` reads weights that are quantized like this."""
    found = quantization if isinstance(quantization, dict) else {}
    method = found.get("quant_method")
    if method == "mxfp4" or (method == "fp8" and found.get("weight_block_size") == [128, 128]):
        return
    raise UserError(
        f"{file}: quantization_config = {shown(json.dumps(quantization))} is neither MXFP4 nor float8 with blocks of 128 x 128; "
        "use a folder with float32, float16 or bfloat16 weights"
    )


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
    return [
        f"{key} = {initial!r} has {name} = {getattr(found, name)!r}, but {section}.{name} = {getattr(model, name)!r}{remedy}"
        for name in different_fields(found, model)
        if f"{section}.{name}" not in allow_changed
    ]


def different_fields(found: TransformerConfig, model: TransformerConfig) -> list[str]:
    """Returns the fields of a model that differ from another one of its class, and that its weights depend on."""
    fields = [field.name for field in dataclasses.fields(model) if field.name not in NOT_COMPARED]  # type: ignore[arg-type]
    return [name for name in fields if not equal(getattr(found, name), getattr(model, name))]


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
