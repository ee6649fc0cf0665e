"""The recipe of `recipes/finetune.py`: the pre-training recipe with chats and LoRA. Does not import torch."""

from collections.abc import Iterator
from typing import Any, ClassVar

from titanlike.config.base import FilePath, matches, section
from titanlike.config.finetune import ChatData, Lora
from titanlike.recipe.pretrain import PretrainRecipe


@section
class FinetuneRecipe(PretrainRecipe):
    """The recipe of `recipes/finetune.py`."""

    program: FilePath = "finetune"
    """Training program: the name of a file next to the recipe or in `recipes/`, or a path. It is relative to the recipe, and on the
    command line to the working directory."""
    data: ChatData = ChatData()
    lora: Lora = Lora()
    elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("preference", "data.source=preference", "data.source=synthetic_preference"), "dpo"),
        **dict.fromkeys(("distillation", "teacher"), "distill"),
    }

    @property
    def trains_all_weights(self) -> bool:
        """Whether no weight is frozen."""
        return self.lora.rank == 0

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between LoRA and another section."""
        lora, model = self.lora, self.model
        if not lora.rank:
            return
        names = [name for name in model.matrices() if name.startswith("layers.")]
        unmatched = [pattern for pattern in lora.layers if not any(matches(pattern, name) for name in names)]
        for pattern in unmatched:
            yield (
                f"lora.layers: {pattern!r} matches no linear layer ({', '.join(model.block_matrices())} in each of layers.0 to "
                f"layers.{model.num_layers - 1})"
            )
        if any(group.optimizer == "muon" for group in getattr(self.optimizer, "groups", ())):
            yield (
                f"optimizer = 'muon' does not support lora.rank = {lora.rank}, whose matrices are products; set lora.rank = 0"
            )
        if self.float8.scaling != "none":
            yield (
                f"lora.rank = {lora.rank} and float8.scaling = {self.float8.scaling!r} are not supported together; set one of them "
                "to 0 or 'none'"
            )
        elif self.parallelism.pipeline > 1 and not unmatched:
            # A pipeline stage without a trained layer would have no backward pass.
            selected = {int(name.split(".")[1]) for name in names if lora.selects(name)}
            first = 0
            for number, size in enumerate(self.parallelism.split(model)):
                if selected.isdisjoint(range(first, first + size)):
                    yield (
                        f"lora.layers selects nothing in blocks {first} to {first + size - 1}, which are stage {number} of the "
                        "pipeline; select layers of all blocks"
                    )
                first += size

    def summary_lines(self) -> list[str]:
        """Returns a line about the layers that LoRA adapts."""
        lora, matrices = self.lora, self.model.matrices()
        selected = {name: size for name, size in matrices.items() if name != "output" and lora.selects(name)}
        if not selected:
            return []
        trained = lora.rank * sum(map(sum, selected.values()))
        names = dict.fromkeys(name.split(".", 2)[2] for name in selected)
        return [
            f"lora    rank {lora.rank}, alpha {lora.alpha:g}: trains {trained:,} parameters beside {', '.join(names)}"
        ]


def lora_of(recipe: PretrainRecipe) -> Lora:
    """Returns the section of a recipe whose program may have none, for tools that work with any program."""
    lora: Any = getattr(recipe, "lora", None)
    return lora if isinstance(lora, Lora) else Lora()
