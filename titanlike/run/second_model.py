"""A second model that only computes forward passes, as the reference of DPO and a teacher do: frozen, and sharded as the trained
model."""

from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn

from titanlike.config.sections import ActivationCheckpoint
from titanlike.interop.weights import load_initial
from titanlike.models.common.config import TransformerConfig
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelize import parallelize
from titanlike.recipe import PretrainRecipe


def build_frozen_model(
    config: TransformerConfig,
    initial: str,
    recipe: PretrainRecipe,
    mesh: Mesh,
    device: torch.device,
    *,
    loss_reduction: Literal["sum", "none"] = "sum",
    seed: int | None = None,
    key: str = "checkpoint.initial",
) -> nn.Module:
    """Returns a model with frozen weights, in the layout of a recipe. Call it under `torch.no_grad()`.

    Args:
        config: config of the model.
        initial: where its weights are, as `checkpoint.initial`. Empty: random weights.
        loss_reduction: see `parallelize`.
        seed: of random weights. Default: the recipe's, whose model starts with the same weights.
        key: the recipe's key that names `initial`, for errors.
    """
    model = parallelize_frozen(config, recipe, mesh, loss_reduction=loss_reduction)
    initialize(model, device, recipe.run.seed if seed is None else seed, offload=recipe.parallelism.cpu_offload)
    if initial:
        load_initial(model, initial, config, recipe.checkpoint.allow_changed, key=key)
    return model


def parallelize_frozen(
    config: TransformerConfig,
    recipe: PretrainRecipe,
    mesh: Mesh,
    *,
    loss_reduction: Literal["sum", "none"] = "sum",
) -> nn.Module:
    """Returns the model of `build_frozen_model` on the meta device."""
    parallelism = recipe.parallelism
    if parallelism.reshard_after_forward == "auto":  # no backward pass follows, for which to keep the last unit
        parallelism = replace(parallelism, reshard_after_forward="always")
    if config.balance_loss:  # of the experts; nothing reads it
        config = replace(cast(Any, config), balance_loss=0.0)
    with torch.device("meta"):
        model = build_model(config)
    model.requires_grad_(False)
    return parallelize(
        model, mesh, split=parallelism.split(config), training=recipe.training, parallelism=parallelism,
        float8=recipe.float8, activation_checkpoint=ActivationCheckpoint(mode="none"),
        compile=recipe.compile, loss_reduction=loss_reduction, static_shapes=config != recipe.model,
    )  # fmt: skip
