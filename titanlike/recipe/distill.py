"""The recipe of `recipes/distill.py`: fine-tuning with a teacher. Does not import torch."""

from collections.abc import Iterator
from typing import ClassVar

from titanlike.config.base import FilePath, section
from titanlike.config.distill import RANDOM, Distillation
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import ModelConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.recipe.pretrain import PretrainRecipe


@section
class DistillRecipe(FinetuneRecipe):
    """The recipe of `recipes/distill.py`."""

    program: FilePath = "distill"
    """Training program: the name of a file next to the recipe or in `recipes/`, or a path. It is relative to the recipe, and on the
    command line to the working directory."""
    teacher: ModelConfig = LlamaConfig()
    distillation: Distillation = Distillation()
    elsewhere: ClassVar[dict[str, str]] = dict.fromkeys(
        ("preference", "data.source=preference", "data.source=synthetic_preference"), "dpo"
    )

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass of a token, and of the forward pass of the teacher."""
        # The backward pass has twice as many as the forward pass.
        teacher_flops = 0 if self.distillation.top_k else self.teacher.flops_per_token(self.training.seq_len) // 3
        return super().flops_per_token + teacher_flops

    @property
    def initial_weights(self) -> dict[str, tuple[str, TransformerConfig]]:
        """The models whose weights are read, by the key that names the files."""
        read = self.distillation.teacher not in ("", RANDOM)
        teacher_weights = {"distillation.teacher": (self.distillation.teacher, self.teacher)} if read else {}
        return super().initial_weights | teacher_weights

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        """The keys of `initial_weights` whose files a resumed run needs again: the teacher's."""
        return ("distillation.teacher",)

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between sections."""
        yield from super().problems()
        model, teacher, parallelism = self.model, self.teacher, self.parallelism
        if teacher.vocab_size != model.vocab_size:
            yield (
                f"teacher.vocab_size = {teacher.vocab_size} differs from model.vocab_size = {model.vocab_size}; the KL divergence "
                "compares the same tokens, so use a teacher with the tokenizer and the vocabulary of the model"
            )
        if teacher.is_encoder_decoder:
            yield f"teacher.name = {teacher.name!r} has an encoder and a decoder, which read two texts; use a decoder"
        elif not teacher.causal:
            yield f"teacher.name = {teacher.name!r} is an encoder, which does not predict the next token; use a decoder"
        if self.training.seq_len > teacher.max_seq_len:
            yield (
                f"training.seq_len = {self.training.seq_len} is longer than the teacher's max_seq_len = {teacher.max_seq_len}; use "
                f"{teacher.max_seq_len} or less"
            )
        for name, config in (("model", model), ("teacher", teacher)):
            if config.num_mtp_layers:
                yield f"{name}.num_mtp_layers = {config.num_mtp_layers}: distillation is of the next token only; set it to 0"
        if parallelism.pipeline > 1:
            yield (
                f"parallelism.pipeline = {parallelism.pipeline}: the teacher's logits of a micro-batch are computed with the "
                "model's, and pipeline schedules interleave micro-batches; use parallelism.shard, tensor or context instead"
            )
        for name, size in teacher.tensor_parallel_sizes().items():
            if size % parallelism.tensor:
                yield (
                    f"parallelism.tensor = {parallelism.tensor} does not divide teacher.{name} = {size}; use a divisor of it"
                )
        for problem in teacher.expert_parallel_problems(parallelism.expert):
            yield problem.replace("model.", "teacher.")
        if self.distillation.top_k > teacher.vocab_size:
            yield (
                f"distillation.top_k = {self.distillation.top_k} is more than teacher.vocab_size = {teacher.vocab_size}; use less, "
                "or 0"
            )
        if self.distillation.top_k and self.data.source == "stream":
            yield (
                f"distillation.top_k = {self.distillation.top_k} is computed for all sequences before the first step, which "
                "data.source = 'stream' does not have; use 'text' or 'shards', or top_k = 0"
            )
        if self.training.z_loss:
            yield f"training.z_loss = {self.training.z_loss} is no part of the loss of distillation; set it to 0"

    def summary_lines(self) -> list[str]:
        """Returns lines about LoRA, the teacher and the loss."""
        section = self.distillation
        divergence = "KL(teacher || model)" if section.loss == "forward_kl" else "KL(model || teacher)"
        weights = "random weights" if section.teacher == RANDOM else section.teacher
        weights += f", its {section.top_k} likeliest tokens from a cache" if section.top_k else ""
        return [
            *super().summary_lines(),
            f"teacher {self.teacher.label()}: {weights}",
            f"loss    {1.0 - section.label_weight:g} x {divergence} at temperature {section.temperature:g}, "
            f"{section.label_weight:g} x cross-entropy",
        ]


def teacher_of(recipe: PretrainRecipe) -> TransformerConfig | None:
    """Returns the teacher's config of a recipe, or None if its program has no teacher, for tools that work with any program."""
    return recipe.teacher if isinstance(recipe, DistillRecipe) else None
