"""The registry of model architectures: a config class and the `nn.Module` that it describes.

An architecture outside of this package registers itself:

    @register_model(MyConfig)
    class MyModel(nn.Module): ...

The config class derives from `TransformerConfig` and holds fields, published sizes and the table of parameters. It does not import
torch, so that a recipe is checked within a second. The module holds what needs tensors; see `LanguageModel`.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from titanlike.config.base import UserError
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import FAMILIES, all_configs, config_class


class LanguageModel(Protocol):
    """What the library requires of a registered module, besides `nn.Module`.

    The token embedding is named `tok_embeddings`, the output projection `output`, and each block has its attention at
    `attention.attend`, which is a `DotProductAttention`. A pipeline stage sets the modules of other stages to None and deletes
    their blocks, so `forward` skips a module that is None. A `DocumentMask` makes the mask of packed documents.
    """

    tensor_plan: Mapping[str, str]
    """The tensor-parallel style of each submodule: `tensor_plan()` of the config."""
    first_stage_modules: ClassVar[tuple[str, ...]]
    """Names of the children that only the first pipeline stage has."""
    last_stage_modules: ClassVar[tuple[str, ...]]
    """Names of the children that only the last pipeline stage has."""
    layers: nn.ModuleDict
    """The blocks. A `ModuleDict`, so that names survive when a stage deletes the blocks of other stages."""

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (B, T, V) for tokens (B, T), or the loss summed over the valid `labels` (B, T).

        If the config's `dropout` is above 0, it is called with `dropout_bits`, too, as `GPT` is.
        """

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills one full parameter with its initial value."""


M = TypeVar("M", bound=type[nn.Module])
TORCH_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
REQUIRED = ("first_stage_modules", "last_stage_modules", "init_parameter")

_models: dict[type[TransformerConfig], type[nn.Module]] = {}


def register_model(config_class: type[TransformerConfig]) -> Callable[[M], M]:
    """Registers the decorated module class as the model that `config_class` describes."""

    if config_class in all_configs():
        raise TypeError(
            f"{config_class.__name__} has a model; derive a config class from it, and register the model for that"
        )

    def register(model_class: M) -> M:
        missing = [name for name in REQUIRED if not hasattr(model_class, name)]
        if missing:
            raise TypeError(
                f"{model_class.__name__} has no {', '.join(missing)}; see titanlike.models.registry.LanguageModel"
            )
        _models[config_class] = model_class
        return model_class

    return register


def build_model(config: TransformerConfig) -> nn.Module:
    """Builds the model that a config describes. Call it under `torch.device("meta")`; `initialize` allocates and fills it."""
    family = FAMILIES.get(config.name)
    if family and type(config) not in _models and type(config) is config_class(config.name):
        module = importlib.import_module(f"titanlike.models.{family.model_folder}.model")
        _models[type(config)] = getattr(module, family.model_class)
    if type(config) not in _models:
        known = ", ".join(sorted(one.__name__ for one in registered_configs()))
        raise ValueError(
            f"no model is registered for {type(config).__name__}; registered configs: {known}; use register_model"
        )
    model = _models[type(config)](config)
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    planned = {name: spec.shape for name, spec in config.parameters().items()}
    if found != planned:
        name = next(one for one in {**found, **planned} if found.get(one) != planned.get(one))
        table, shapes = f"{type(config).__name__}.block_parameters", (planned.get(name), found.get(name))
        raise ValueError(f"{name} has the shape {shapes[0]} in {table}, but {shapes[1]} in {type(model).__name__}")
    for name, module in model.named_modules():
        # Its mask would repeat on ranks with other tokens, change in recomputation, and apply to validation.
        if isinstance(module, TORCH_DROPOUT) and module.p:
            raise UserError(
                f"{name} of {type(model).__name__} is a torch.nn.{type(module).__name__} with p = {module.p}, whose mask depends "
                "on the layout; use titanlike.models.common.dropout.Dropout, or p = 0"
            )
    return model


def registered_configs() -> tuple[type[TransformerConfig], ...]:
    """Returns the config classes of all registered models."""
    return tuple(dict.fromkeys((*all_configs(), *_models)))


def blocks(model: nn.Module) -> nn.ModuleDict:
    """Returns the blocks of a model by name: the unit of compilation, recomputation and sharding."""
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleDict)
    return layers
