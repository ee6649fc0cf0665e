"""A recipe on a number of GPUs: the sizes that all formulas of the planner start from. Does not import torch."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from titanlike.config.finetune import Lora
from titanlike.config.layout import SCHEDULES, PipelineSchedule, stages_of
from titanlike.config.sections import DTYPE_BYTES, ActivationCheckpoint, Parallelism
from titanlike.models.t5.config import T5Config
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.distill import DistillRecipe, teacher_of
from titanlike.recipe.dpo import reference_of
from titanlike.recipe.finetune import lora_of
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.tools.planning.architecture import has_norms_after_layers, has_post_norms
from titanlike.tools.planning.program import TITANLIKE, Program


@dataclass(frozen=True)
class Job:
    """A recipe on a number of GPUs. Raises `UserError` where the layout or the batch does not divide."""

    recipe: PretrainRecipe
    num_gpus: int
    program: Program = TITANLIKE
    forward_only: bool = False  # of a second, frozen model

    @cached_property
    def layout(self) -> Parallelism:
        """The section `parallelism` with `shard` inferred from the number of GPUs."""
        return self.recipe.parallelism.resolve(self.num_gpus)

    @property
    def lora(self) -> Lora:
        """The section `lora`; its defaults, which disable LoRA, if the program has none."""
        return lora_of(self.recipe)

    @property
    def trains_on_pairs(self) -> bool:
        """Whether the loss is one of preference pairs: the backward pass then computes the logits again."""
        return reference_of(self.recipe) is not None

    @property
    def distills(self) -> bool:
        """Whether the loss compares with a teacher: it computes the logits of both models."""
        return teacher_of(self.recipe) is not None

    @property
    def top_k(self) -> int:
        """How many of a teacher's likeliest tokens the loss reads from a cache; 0: it reads the logits."""
        return self.recipe.distillation.top_k if isinstance(self.recipe, DistillRecipe) else 0

    @property
    def frozen_forwards(self) -> int:
        """Number of forward passes without a gradient that the model itself has in a micro-batch: as its own reference."""
        return int(reference_of(self.recipe) == "adapter_off" and not self.forward_only)

    @cached_property
    def second(self) -> "Job | None":
        """The forward passes of a second, frozen model: a reference or a teacher."""
        recipe = self.recipe
        if self.forward_only or not ((self.distills and not self.top_k) or reference_of(recipe) == "model"):
            return None
        parallelism = recipe.parallelism
        if parallelism.reshard_after_forward == "auto":  # as `run/second_model.py`
            parallelism = replace(parallelism, reshard_after_forward="always")
        changes: dict[str, Any] = {"lora": Lora(), "parallelism": parallelism}
        changes |= {"model": teacher_of(recipe) or recipe.model, "activation_checkpoint": ActivationCheckpoint()}
        return replace(self, recipe=replace(recipe, **changes), forward_only=True)

    @property
    def second_name(self) -> str:
        """What the second model is, or the first one where it is its own reference."""
        return "teacher" if self.distills else "reference model"

    @property
    def frozen_dtype(self) -> str:
        """The dtype of weights without a gradient, as `parallelize` chooses it: of a second model, and beside LoRA's matrices."""
        training = self.recipe.training
        return training.master_dtype if self.recipe.float8.all_gather else training.compute_dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the model's weights: of the frozen ones, with LoRA."""
        frozen = self.forward_only or self.lora.rank > 0
        return DTYPE_BYTES[self.frozen_dtype if frozen else self.recipe.training.master_dtype]

    @property
    def num_predicted(self) -> int:
        """Number of tokens that each position predicts: more than one with multi-token prediction."""
        return 1 + self.recipe.model.num_mtp_layers * (not self.forward_only)

    @cached_property
    def split(self) -> list[int]:
        """Number of blocks of each pipeline stage."""
        return self.layout.split(self.recipe.model)

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The pipeline schedule."""
        return SCHEDULES[self.layout.pipeline_schedule]

    @property
    def reads_last_product(self) -> bool:
        """Whether the backward pass reads the output of a block's last matmul, which dropout or a norm follows."""
        model = self.recipe.model
        return model.dropout > 0 or has_post_norms(model) or has_norms_after_layers(model)

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that train on different sequences."""
        return self.layout.replicate * self.layout.shard

    @property
    def num_shards(self) -> int:
        """Number of ranks over which FSDP shards weights, gradients and optimizer state."""
        return self.layout.shard * self.layout.context

    @property
    def num_expert_shards(self) -> int:
        """Number of ranks over which FSDP shards the experts of a rank, one of each expert-parallel group."""
        return self.num_shards // self.layout.expert

    @cached_property
    def num_microbatches(self) -> int:
        """Number of forward and backward passes of a rank in a step."""
        return self.recipe.training.num_microbatches(self.num_data_ranks)

    @property
    def sequences(self) -> int:
        """Number of sequences in a micro-batch of a rank."""
        return self.recipe.training.global_batch_size // self.num_data_ranks // self.num_microbatches

    @property
    def tokens(self) -> int:
        """Number of tokens in a micro-batch of a rank: each context-parallel rank has a part of each sequence."""
        return self.sequences * self.recipe.training.seq_len // self.layout.context

    @property
    def decoder_tokens(self) -> int:
        """Number of tokens in a micro-batch of a rank that the LM head computes: of the targets, if there is an encoder."""
        if not isinstance(self.recipe, Seq2SeqRecipe):
            return self.tokens
        return self.sequences * self.recipe.target_len

    def tokens_of(self, index: int) -> int:
        """Returns the number of tokens of a block in a micro-batch of a rank."""
        return self.decoder_tokens if self.has_cross_attention(index) else self.tokens

    def has_cross_attention(self, index: int) -> bool:
        """Whether a block attends to the output of an encoder."""
        model = self.recipe.model
        return isinstance(model, T5Config) and model.has_cross_attention(index)

    def stages(self, rank: int) -> list[int]:
        """Returns the pipeline stages of a pipeline rank."""
        if self.layout.pipeline == 1:
            return [0]
        return stages_of(rank, self.layout.pipeline, len(self.split), v_shaped=self.schedule.v_shaped)

    def adds_head_gradient(self) -> bool:
        """Whether, on GPUs, the loss adds the gradient of the LM head to that of earlier micro-batches."""
        training = self.recipe.training
        is_own_loss = self.program is TITANLIKE and not (self.trains_on_pairs or self.distills or self.uses_fsdp())
        in_float32 = training.compute_dtype == "bfloat16" and training.master_dtype == "float32"
        return is_own_loss and in_float32 and self.num_microbatches > 1

    def uses_fsdp(self) -> bool:
        """Whether FSDP wraps the model: `parallelize` leaves it out on one rank, where it would only copy the weights."""
        alone = self.num_shards * self.layout.replicate * self.layout.tensor == 1
        return not alone or self.recipe.float8.all_gather or self.layout.cpu_offload
