"""The recipe of `recipes/dpo.py`: fine-tuning with preference pairs. Does not import torch."""

from collections.abc import Iterator
from typing import ClassVar

from titanlike.config.base import FilePath, section
from titanlike.config.dpo import Preference, PreferenceData
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.recipe.pretrain import PretrainRecipe


@section
class DpoRecipe(FinetuneRecipe):
    """The recipe of `recipes/dpo.py`."""

    program: FilePath = "dpo"
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
        """The keys of `initial_weights` whose files a resumed run needs again: the reference model's."""
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
        """Returns lines about LoRA, the loss and its reference."""
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
