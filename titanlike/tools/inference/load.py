"""Models with the weights of a run, a checkpoint or a Hugging Face folder, for generation and evaluation."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from titanlike.config import UserError
from titanlike.config.base import divisors, one_of
from titanlike.config.sections import ActivationCheckpoint, Compile, DType, Float8, Parallelism, Training
from titanlike.interop.weights import CheckpointWeights, Weights, load_weights
from titanlike.models.common.config import TransformerConfig
from titanlike.models.registry import blocks, build_model
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelisms.mixed_precision import cast_parameters
from titanlike.parallelisms.tensor import apply_tensor
from titanlike.parallelize import parallelize


def default_dtype(device: torch.device) -> DType:
    """Returns the precision to compute in: many CPUs are slow in bfloat16."""
    return "bfloat16" if device.type == "cuda" else "float32"


def load_for_generation(
    weights: Weights, mesh: Mesh, device: torch.device, dtype: DType, *, encoder_decoder: bool = False
) -> nn.Module:
    """Returns a model that takes one token at a time: under tensor parallelism activations are replicated, not sharded along the
    sequence. `encoder_decoder` allows one with an encoder."""
    _check_config(weights.config, mesh.tensor.size(), encoder_decoder)
    with torch.device("meta"):
        model = build_model(weights.config)
    cast_parameters(model, getattr(torch, dtype))
    if mesh.tensor.size() > 1:
        plan = cast(Mapping[str, str], model.tensor_plan)
        apply_tensor(model, plan, mesh.tensor, blocks=blocks(model), sequence_parallel=False)
    return _fill(model, weights, device)


def load_for_evaluation(
    weights: Weights, mesh: Mesh, parallelism: Parallelism, device: torch.device, dtype: DType
) -> nn.Module:
    """Returns a model under the layout that `mesh` has, for full sequences."""
    _check_config(weights.config, mesh.tensor.size())
    with torch.device("meta"):
        model = build_model(weights.config)
    model = parallelize(
        model,
        mesh,
        split=parallelism.split(weights.config),
        training=Training(compute_dtype=dtype, master_dtype=dtype),
        parallelism=parallelism,
        float8=Float8(),
        activation_checkpoint=ActivationCheckpoint(),
        compile=Compile(mode="none"),
    )
    return _fill(model, weights, device)


def training_recipe(weights: Weights) -> Mapping[str, Any]:
    """Returns the recipe that a checkpoint records; empty for a Hugging Face folder."""
    return weights.metadata.recipe if isinstance(weights, CheckpointWeights) else {}


def _fill(model: nn.Module, weights: Weights, device: torch.device) -> nn.Module:
    model.to_empty(device=device)
    load_weights(model, weights)
    return model.eval().requires_grad_(False)


def _check_config(config: TransformerConfig, tensor: int, encoder_decoder: bool = False) -> None:
    """Raises `UserError` if a model does not continue text, or if a number of tensor-parallel ranks does not divide its sizes."""
    if config.is_encoder_decoder and not encoder_decoder:
        raise UserError(
            f"model.name = {config.name!r} has an encoder and a decoder: it neither chats nor scores text; `titanlike generate` "
            "generates a target for each prompt, and a run records the loss of held-out targets"
        )
    if not config.causal:
        raise UserError(
            f"model.name = {config.name!r} is an encoder: it predicts masked tokens, and neither generates text nor scores it; its "
            "run records the loss and accuracy of held-out text, and `titanlike export` writes it for transformers"
        )
    sizes = config.tensor_parallel_sizes()
    wrong = {name: size for name, size in sizes.items() if size % tensor}
    if wrong:
        name, size = next(iter(wrong.items()))
        possible = [n for n in divisors(size) if all(other % n == 0 for other in sizes.values())]
        raise UserError(
            f"{tensor} tensor-parallel processes do not divide model.{name} = {size}; use {one_of(possible)}"
        )
