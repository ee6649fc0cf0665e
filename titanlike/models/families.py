"""The model families of this package by name. The config and the module of a family are imported when it is used.

Does not import torch.
"""

import json
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple, Union

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from titanlike.models.common.config import TransformerConfig


class Family(NamedTuple):
    """Where a family is: the folders in `titanlike/models` and the classes of its config and of its `nn.Module`."""

    config_folder: str
    config_class: str
    model_folder: str
    model_class: str


FAMILIES = {
    "llama": Family("llama", "LlamaConfig", "llama", "Llama"),
    "smollm3": Family("smollm3", "SmolLM3Config", "smollm3", "SmolLM3"),
    "olmo2": Family("olmo2", "Olmo2Config", "olmo2", "Olmo2"),
    "qwen2": Family("qwen", "Qwen2Config", "qwen", "Qwen2"),
    "qwen3": Family("qwen", "Qwen3Config", "qwen", "Qwen3"),
    "qwen3_moe": Family("moe", "Qwen3MoeConfig", "qwen", "Qwen3Moe"),
    "mistral": Family("mistral", "MistralConfig", "mistral", "Mistral"),
    "phi3": Family("phi3", "Phi3Config", "mistral", "Mistral"),
    "mixtral": Family("moe", "MixtralConfig", "moe", "MoeLlama"),
    "deepseek_v2": Family("deepseek", "DeepseekV2Config", "deepseek", "Deepseek"),
    "deepseek_v3": Family("deepseek", "DeepseekV3Config", "deepseek", "Deepseek"),
    "gpt_oss": Family("gpt_oss", "GptOssConfig", "gpt_oss", "GptOss"),
    "gemma2": Family("gemma", "Gemma2Config", "gemma", "Gemma"),
    "gemma3": Family("gemma", "Gemma3Config", "gemma", "Gemma"),
    "gpt": Family("gpt", "GPTConfig", "gpt", "GPT"),
    "bert": Family("bert", "BertConfig", "bert", "Bert"),
    "modernbert": Family("modernbert", "ModernBertConfig", "modernbert", "ModernBert"),
    "t5": Family("t5", "T5Config", "t5", "T5"),
}


def config_class(name: str) -> type[TransformerConfig]:
    """Returns the config class of a family."""
    family = FAMILIES[name]
    found: type[TransformerConfig] = getattr(
        import_module(f"titanlike.models.{family.config_folder}.config"), family.config_class
    )
    return found


def all_configs() -> tuple[type[TransformerConfig], ...]:
    """Returns the config classes of all families."""
    return tuple(map(config_class, FAMILIES))


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(config_class(name))


class _ByName:
    """Validates a config of the family that its `name` says, and describes the configs of all families."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        union: Any = Annotated[Union[all_configs()], Field(discriminator="name")]  # noqa: UP007
        return handler(TypeAdapter(union).core_schema)


def _validate(value: Any) -> TransformerConfig:
    is_config = isinstance(value, TransformerConfig)
    if not is_config and not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "Input should be a table")
    name = value.name if isinstance(value, TransformerConfig) else value.get("name")
    if not isinstance(name, str) or name not in FAMILIES:
        context = {"tag": str(name), "expected_tags": ", ".join(map(repr, FAMILIES))}
        raise PydanticCustomError("union_tag_invalid", "The name {tag} is none of {expected_tags}", context)
    try:
        # A strict section takes a table from JSON only, as a recipe is read.
        adapter = _adapter(name)
        config: TransformerConfig = (
            adapter.validate_python(value) if is_config else adapter.validate_json(json.dumps(value))
        )
    except ValidationError as error:
        # The name of the family comes between the section and the key.
        lines = [
            InitErrorDetails(
                type=detail["type"], loc=(name, *detail["loc"]), input=detail["input"], ctx=detail.get("ctx", {})
            )
            for detail in error.errors()
        ]
        raise ValidationError.from_exception_data(error.title, lines) from None
    return config


ModelConfig = Annotated[TransformerConfig, _ByName()]
