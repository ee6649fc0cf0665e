"""The section `distillation`. Does not import torch."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from titanlike.config.base import FilePath, Fraction, NonNegative, section

RANDOM = "random"


@section
class Distillation:
    """The teacher's weights, and the loss that compares the model with it."""

    teacher: FilePath = ""
    """Weights of the teacher: a Hugging Face folder, a run directory (its newest checkpoint) or a checkpoint. The section `teacher`
    describes its architecture. It has the tokenizer of the model. `random` draws its weights, to measure speed and memory."""
    loss: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    """KL divergence of a token. `forward_kl`: KL(teacher || model), which covers all that the teacher finds likely. `reverse_kl`:
    KL(model || teacher), which avoids what the teacher finds unlikely."""
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Divides the logits of both models before the KL divergence, which is multiplied by its square: the gradients keep their
    size. Values above 1 give more weight to unlikely tokens."""
    label_weight: Fraction = 0.5
    """Weight of the cross-entropy of the labels in the loss. The KL divergence has the weight 1 - `label_weight`."""
    top_k: NonNegative = 0
    """Keep the log-probabilities of the teacher's `top_k` likeliest tokens, and of all others together, in `data.cache`: the
    teacher computes them once, for all sequences of the data, before the first step, and is not loaded again. The KL divergence is
    then over these `top_k` + 1 events. 0: the teacher computes in each step, and the divergence is over the vocabulary."""

    @property
    def weights(self) -> tuple[float, float]:
        """Factors of the KL divergence and of the cross-entropy in the loss."""
        return self.temperature**2 * (1.0 - self.label_weight), self.label_weight

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction among the keys."""
        if not self.teacher:
            yield (
                "distillation.teacher is empty; give a run, a checkpoint or a Hugging Face folder, or 'random' to measure speed "
                "and memory"
            )
        if self.label_weight == 1.0:
            yield "distillation.label_weight = 1.0 leaves nothing to learn from the teacher; use less, or the program 'finetune'"
