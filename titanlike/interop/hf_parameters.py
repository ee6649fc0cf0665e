"""Which tensors a model's Hugging Face checkpoint has, and where each parameter is in them."""

from dataclasses import dataclass

from titanlike.checkpoint.format import ShardRange
from titanlike.config import UserError
from titanlike.models.base_config import ParameterSpec, TransformerConfig


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
    transposed: bool
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
        for hf_name, (outputs, *inputs), shard_range in parts:
            full = (outputs * spec.num_parts, *inputs)
            tensor = StoredTensor(full[::-1] if spec.transposed else full, spec.transposed, {})
            stored.setdefault(hf_name, tensor).parts[spec.part] = (name, shard_range)
    for hf_name, name in config.hf_copies().items():
        shape = config.parameters()[name].shape
        stored[hf_name] = StoredTensor(shape, False, {0: (name, whole(shape))})
    return stored


def whole(shape: tuple[int, ...]) -> ShardRange:
    """Returns the range of all of a tensor."""
    return ShardRange(shape, (0,) * len(shape), shape)
