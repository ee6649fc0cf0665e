"""Sections of training with preference pairs. Does not import torch."""

from typing import Annotated, Literal

from pydantic import Field

from titanlike.config.base import NonNegativeFloat, PositiveFloat, only_with, section
from titanlike.config.finetune import ChatData


@section
class PreferenceData(ChatData):
    """Training and validation data."""

    source: Literal["preference", "synthetic_preference"] = "preference"  # type: ignore[assignment]
    """`preference`: pairs of a chosen and a rejected answer, in JSON lines or Parquet. `synthetic_preference`: generated questions
    about sums, with a right and a wrong answer."""


@section
class Preference:
    """Loss of preference pairs."""

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """`dpo`: direct preference optimization, the cross-entropy of the difference of rewards. `ipo`: the squared distance of that
    difference from a margin of 1 / (2 `beta`), with log-probabilities averaged over an answer's tokens. `simpo`: as `dpo`, with
    average log-probabilities as rewards, less `simpo_gamma`, and without a reference model."""
    beta: PositiveFloat = 0.1
    """Factor of the rewards: larger values keep the model closer to the reference. Common values are 0.1 for `dpo` and `ipo`, and
    2 for `simpo`."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5), only_with("loss", "dpo", "simpo")] = 0.0
    """Probability that the labels of a pair are exchanged, for noisy preferences (conservative DPO). 0 disables it."""
    simpo_gamma: Annotated[NonNegativeFloat, only_with("loss", "simpo")] = 0.5
    """Target margin of the rewards, for `simpo` only."""
    reference: Annotated[Literal["auto", "adapter_off", "model", "precomputed"], only_with("loss", "dpo", "ipo")] = (
        "auto"
    )
    """Source of the log-probabilities of the reference model, which is the model that training starts from. `adapter_off`: the
    model without its LoRA adapters. `model`: a second, frozen model, sharded as the first one. `precomputed`: computed once, before
    the first step, and cached in `data.cache`. `auto`: `adapter_off` with LoRA, otherwise `model`."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.loss != "simpo"
