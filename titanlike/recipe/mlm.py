"""The recipe of `recipes/mlm.py`: pre-training with masked tokens. Does not import torch."""

from collections.abc import Iterator
from typing import ClassVar

from titanlike.config.base import FilePath, section
from titanlike.config.mlm import MaskedTokens
from titanlike.models.bert.config import BertConfig
from titanlike.models.families import ModelConfig
from titanlike.recipe.pretrain import PretrainRecipe

BYTES = 257  # tokens of the byte tokenizer, none of which is a mask token


@section
class MlmRecipe(PretrainRecipe):
    """The recipe of `recipes/mlm.py`."""

    program: FilePath = "mlm"
    """Training program: the name of a file next to the recipe or in `recipes/`, or a path. It is relative to the recipe, and on the
    command line to the working directory."""
    model: ModelConfig = BertConfig()
    mlm: MaskedTokens = MaskedTokens()
    elsewhere: ClassVar[dict[str, str]] = {
        name: program for name, program in PretrainRecipe.elsewhere.items() if program != "mlm"
    }
    causal: ClassVar[bool] = False

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between sections."""
        yield from super().problems()
        if self.tokenizer.encoding == "bytes" and not self.mlm.mask_token and self.model.vocab_size == BYTES:
            yield (
                f"model.vocab_size = {BYTES} leaves no row for a mask token, which tokenizer.encoding = 'bytes' does not have; use "
                f"{BYTES + 1} or more"
            )
        if self.sample.tokens:
            yield f"sample.tokens = {self.sample.tokens}: an encoder does not generate text; set it to 0"
        if self.evaluation.interval:
            yield (
                f"evaluation.interval = {self.evaluation.interval}: an encoder does not predict the next token; set it to 0, and "
                "validation.interval for the loss and accuracy of masked tokens"
            )
