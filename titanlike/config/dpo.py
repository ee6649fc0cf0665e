"""The recipe of `recipes/dpo.py`: that of fine-tuning with preference pairs. Does not import torch."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from titanlike.config.base import FilePath, NonNegativeFloat, PositiveFloat, only_with, section
from titanlike.config.finetune import ChatData, FinetuneRecipe
from titanlike.config.sections import PretrainRecipe


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


@section
class DpoRecipe(FinetuneRecipe):
    """The recipe of `recipes/dpo.py`."""

    recipe: FilePath = "dpo"
    """Training program: the name of a file next to the recipe or in `recipes/`, or a path. It is relative to the recipe, and on the
    command line to the working directory."""
    data: PreferenceData = PreferenceData()
    preference: Preference = Preference()
    elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("data.source=chat", "data.source=synthetic_chat"), "finetune"),
        **dict.fromkeys(("distillation", "teacher"), "distill"),
    }

    @property
    def reference(self) -> str:
        """The source of the reference's log-probabilities: a value of `preference.reference`, or "none"."""
        if not self.preference.has_reference:
            return "none"
        if self.preference.reference != "auto":
            return self.preference.reference
        return "adapter_off" if self.lora.rank else "model"

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass of a token, and of the forward pass of the reference model."""
        forward = self.model.flops_per_token(self.training.seq_len) // 3  # the backward pass has twice as many
        return super().flops_per_token + (forward if self.reference in ("adapter_off", "model") else 0)

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        """The keys of `initial_weights` whose files a resumed run needs again: those of the reference model."""
        return ("checkpoint.initial",) if self.reference in ("model", "precomputed") else ()

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between sections."""
        yield from super().problems()
        if self.reference == "adapter_off" and not self.lora.rank:
            yield (
                "preference.reference = 'adapter_off' disables LoRA adapters, but lora.rank = 0; set lora.rank, or "
                "preference.reference = 'model'"
            )
        if self.parallelism.pipeline > 1:
            yield (
                f"parallelism.pipeline = {self.parallelism.pipeline}: the loss of a pair needs the sums of both answers before the "
                "backward pass, which pipeline schedules do not wait for; use parallelism.shard, tensor or context instead"
            )
        if self.training.z_loss:
            yield f"training.z_loss = {self.training.z_loss} is no part of a preference loss; set it to 0"
        if balance_loss := getattr(self.model, "balance_loss", 0.0):
            yield (
                f"model.balance_loss = {balance_loss} is no part of a preference loss; set it to 0, and "
                "model.balance_bias_rate to balance the experts"
            )
        if mtp := self.model.num_mtp_layers:
            yield f"model.num_mtp_layers = {mtp}: further tokens are no part of a preference loss; set it to 0"

    def summary_lines(self) -> list[str]:
        """Returns a line about the loss and its reference, besides those of LoRA."""
        section, reference = self.preference, self.reference
        initial = self.checkpoint.initial or "the random initial weights"
        described = {
            "adapter_off": "the model without its adapters",
            "model": f"a second, frozen model: {initial}",
            "precomputed": f"cached log-probabilities of {initial}",
            "none": "none",
        }
        return [
            *super().summary_lines(),
            f"loss    {section.loss}, beta {section.beta:g}; reference: {described[reference]}",
        ]


def reference_of(recipe: PretrainRecipe) -> str | None:
    """Returns the source of the reference's log-probabilities of a recipe, or None if its program does not train with preference
    pairs, for tools that work with any program."""
    return recipe.reference if isinstance(recipe, DpoRecipe) else None
