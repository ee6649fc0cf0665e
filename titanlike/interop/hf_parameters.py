"""Which tensors a model's Hugging Face checkpoint has, and where each parameter is in them."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from titanlike.checkpoint.format import ShardRange
from titanlike.config import UserError
from titanlike.models.common.config import ParameterSpec, TransformerConfig

T = TypeVar("T")


def hf_parameters(config: TransformerConfig) -> dict[str, ParameterSpec]:
    """Returns where each parameter of a model is in a Hugging Face checkpoint."""
    parameters = config.parameters()
    unknown = [name for name, spec in parameters.items() if not spec.hf_name]
    if unknown or not config.hf_architecture:
        raise UserError(
            f"model.name = {config.name!r} cannot be converted: "
            + (f"there is no hf_name of {unknown[0]}" if unknown else "it has no hf_architecture")
        )
    return parameters


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face checkpoint."""

    shape: tuple[int, ...]
    spec: ParameterSpec
    """Of a parameter in it."""
    parts: dict[int, tuple[str, ShardRange]]
    """What it consists of, along the output dimension: parameters, or elements of stacked parameters."""


def stored_tensors(config: TransformerConfig) -> dict[str, StoredTensor]:
    """Returns the tensors of a model's Hugging Face checkpoint by name."""
    stored: dict[str, StoredTensor] = {}
    for name, spec in hf_parameters(config).items():
        shape = spec.shape
        parts = [(spec.hf_name, shape, whole(shape))]
        if spec.is_stacked:
            ranges = [ShardRange(shape, (i, *(0 for _ in shape[1:])), (1, *shape[1:])) for i in range(shape[0])]
            parts = [(spec.at(i).hf_name, shape[1:], one) for i, one in enumerate(ranges)]
        for hf_name, part_shape, shard_range in parts:
            full = list(part_shape)
            full[output_dim(spec)] = sum(spec.parts) or full[output_dim(spec)]
            tensor = StoredTensor(tuple(_as_stored(spec, full)), spec, {})
            stored.setdefault(hf_name, tensor).parts[spec.part] = (name, shard_range)
    for hf_name, name in config.hf_copies().items():
        spec = config.parameters()[name]
        stored[hf_name] = StoredTensor(spec.shape, spec, {0: (name, whole(spec.shape))})
    return stored


def output_dim(spec: ParameterSpec) -> int:
    """Returns the dimension of a parameter, or of a tensor of a stack, in which it is one of several parts."""
    return 1 if spec.style == "experts" and not spec.is_stacked else 0


def join_parts(spec: ParameterSpec, parts: list[Tensor]) -> Tensor:
    """Returns the values of a stored tensor from its parts in order. `spec` belongs to any of them."""
    values = torch.stack(parts, 2).flatten(1, 2) if output_dim(spec) else torch.cat(parts)
    return values.mT if spec.transposed else values


def stored_part(spec: ParameterSpec, shard_range: ShardRange) -> list[slice]:
    """Returns where the values of a shard of a parameter are in a stored tensor, with the values of other parts in between."""
    start, size, dim = list(shard_range.offset), list(shard_range.shape), output_dim(spec)
    if dim:
        start[dim], size[dim] = start[dim] * _step(spec), size[dim] * _step(spec)
    else:
        start[0] += sum(spec.parts[: spec.part])
    return _as_stored(spec, [slice(first, first + number) for first, number in zip(start, size, strict=True)])


def select_part(spec: ParameterSpec, values: Tensor) -> Tensor:
    """Returns the values of a shard of a parameter, from the values at its `stored_part`."""
    values = values.mT if spec.transposed else values
    return values[:, spec.part :: _step(spec)] if output_dim(spec) else values


def _step(spec: ParameterSpec) -> int:
    """Returns the number of parameters whose outputs alternate."""
    return max(len(spec.parts), 1)


def _as_stored(spec: ParameterSpec, dimensions: list[T]) -> list[T]:
    """Returns what a list has for each dimension in the order in which they are stored."""
    return [*dimensions[:-2], *reversed(dimensions[-2:])] if spec.transposed else dimensions


def whole(shape: tuple[int, ...]) -> ShardRange:
    """Returns the range of all of a tensor."""
    return ShardRange(shape, (0,) * len(shape), shape)
