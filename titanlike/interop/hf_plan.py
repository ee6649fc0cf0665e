"""Which tensors a model's Hugging Face checkpoint has, and where each parameter is in them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from titanlike.checkpoint.format import ShardRange
from titanlike.config import UserError
from titanlike.config.model_configs import TransformerConfig
from titanlike.models import build_model
from titanlike.models.hf_tensors import HFTensor, hf_tensor


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters of a model by name."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in build_model(config).named_parameters()}


def hf_plan(config: TransformerConfig) -> dict[str, HFTensor]:
    """Returns where each parameter of a model is in a Hugging Face checkpoint."""
    with torch.device("meta"):
        model = build_model(config)
    plan: Mapping[str, HFTensor] = getattr(model, "hf_tensors", {})
    found = {name: hf_tensor(plan, name) for name, _ in model.named_parameters()}
    unknown = [name for name, tensor in found.items() if tensor is None]
    if unknown or not config.hf_architecture:
        raise UserError(
            f"model.name = {config.name!r} cannot be converted: "
            + (f"{type(model).__name__}.hf_tensors has no {unknown[0]}" if unknown else "it has no hf_architecture")
        )
    return {name: tensor for name, tensor in found.items() if tensor}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face checkpoint."""

    shape: tuple[int, ...]
    transposed: bool
    parts: dict[int, tuple[str, ShardRange]]
    """What it consists of, along the output dimension: parameters, or elements of stacked parameters."""


def stored_tensors(config: TransformerConfig) -> dict[str, StoredTensor]:
    """Returns the tensors of a model's Hugging Face checkpoint by name."""
    stored: dict[str, StoredTensor] = {}
    shapes = parameter_shapes(config)
    for name, tensor in hf_plan(config).items():
        shape = shapes[name]
        if tensor.stacked:
            offsets = [(index, *(0 for _ in shape[1:])) for index in range(shape[0])]
            parts = [
                (tensor.element(offset[0]), shape[1:], ShardRange(shape, offset, (1, *shape[1:]))) for offset in offsets
            ]
        else:
            parts = [(tensor, shape, whole(shape))]
        for one, (outputs, *inputs), shard_range in parts:
            full = (outputs * one.num_parts, *inputs)
            found = stored.setdefault(
                one.name, StoredTensor(full[::-1] if one.transposed else full, one.transposed, {})
            )
            found.parts[one.part] = (name, shard_range)
    return stored


def whole(shape: tuple[int, ...]) -> ShardRange:
    """Returns the range of all of a tensor."""
    return ShardRange(shape, (0,) * len(shape), shape)
