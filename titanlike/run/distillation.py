"""Training with a teacher: its logits, the loss and its gradients, and the loss of held-out data."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlike.config import UserError
from titanlike.config.distill import RANDOM, Distillation
from titanlike.data.batches.dataloaders import DataLoaders
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.distributed import collectives, process_group
from titanlike.interop.weights import NO_SHARE, CheckpointWeights, Weights, open_weights
from titanlike.losses.chunked import Logits
from titanlike.losses.cross_entropy import means_of, num_valid
from titanlike.losses.distillation import DistillationLoss, KeptLogits
from titanlike.losses.top_k import TopK
from titanlike.models.common.layers import set_loss
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelize import fsdp_units
from titanlike.recipe.distill import DistillRecipe
from titanlike.run.likeliest_tokens import add_top_k, top_k_of_batch
from titanlike.run.second_model import build_frozen_model
from titanlike.utils.modules import without_owner

TeacherLogits = Callable[[Batch], AbstractContextManager[Logits]]
Targets = Callable[[Batch], AbstractContextManager[Logits | TopK]]


def build_objective(
    recipe: DistillRecipe,
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    tokenizer: Tokenizer,
    data: DataLoaders,
) -> "DistillationObjective":
    """Returns the objective of a recipe, with its teacher, and sets the loss of the model."""
    section = recipe.distillation
    weights, seed = "" if section.teacher == RANDOM else section.teacher, recipe.run.seed + 1
    if weights:
        check_tokenizer(open_weights(Path(weights), verify_share=NO_SHARE), tokenizer)

    def build_teacher() -> TeacherLogits:
        process_group.announce(f"building the teacher: {recipe.teacher.label()}")
        frozen = build_frozen_model(
            recipe.teacher, weights, recipe, mesh, device, key="distillation.teacher", seed=seed
        )
        return Teacher(frozen, reshards=recipe.parallelism.reshard_after_forward != "never").logits

    if section.top_k:
        add_top_k(recipe, mesh, data, weights, seed, build_teacher)
        gc.collect()  # FSDP's modules refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()

        def likeliest(batch: Batch) -> AbstractContextManager[TopK]:
            return nullcontext(top_k_of_batch(batch))

        targets: Targets = likeliest
    else:
        targets = build_teacher()
    loss = set_distillation_loss(model, section)
    return DistillationObjective(loss, targets, section.weights)


def set_distillation_loss(model: nn.Module, section: Distillation) -> DistillationLoss:
    """Replaces the loss of a model, which `parallelize` has set, and returns the new one."""
    head: Any = without_owner(model.get_submodule("output"))
    loss = DistillationLoss(section, head.loss)
    set_loss(model, loss)
    return loss


def check_tokenizer(weights: Weights, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if a teacher was trained with another tokenizer, as far as its files tell."""
    remedy = "a KL divergence compares the same tokens: use a teacher with the tokenizer of the model"
    if isinstance(weights, CheckpointWeights):
        if weights.metadata.tokenizer in ("", tokenizer.fingerprint):
            return
    elif not Path(weights.path, "tokenizer.json").is_file():
        return
    other = build_tokenizer(weights.tokenizer, weights.config.vocab_size, str(weights.path))
    if difference := tokenizer.difference(other):
        raise UserError(
            f"distillation.teacher: {weights.path} has the tokenizer {weights.tokenizer.encoding!r}, which differs from "
            f"tokenizer.encoding = {tokenizer.section.encoding!r}: {difference}; {remedy}"
        )


class Teacher:
    """A frozen model, of which the logits are computed in the loss of another one."""

    def __init__(self, model: nn.Module, *, reshards: bool = True) -> None:
        """`reshards`: whether FSDP frees the weights of the LM head after they have been read."""
        self.model, self.kept = model, KeptLogits()
        set_loss(model, self.kept)
        self.head_unit: Any = None
        if reshards and isinstance(model, FSDPModule):
            # The loss reads the weight after the forward pass.
            last = fsdp_units(model)[-1]
            is_tied = not list(model.get_submodule("output").parameters())
            self.head_unit = model if is_tied else last[0] if isinstance(last, list) else last
            self.head_unit.set_reshard_after_forward(False, recurse=False)

    @contextmanager
    def logits(self, batch: Batch) -> Iterator[Logits]:
        """Yields what the logits of a batch are computed from, and frees it after the context."""
        inputs = {name: value for name, value in batch.inputs.items() if name != "dropout_bits"}
        with torch.no_grad():
            self.model(**inputs, labels=batch.labels)
        try:
            yield cast(Logits, self.kept.found)
        finally:
            self.kept.found = None
            if self.head_unit is not None:
                self.head_unit.reshard()


@dataclass(frozen=True)
class DistillationObjective:
    """The mean loss over the valid labels, all of which have the same weight, whatever their rank and micro-batch."""

    loss: DistillationLoss
    targets: Targets
    weights: tuple[float, float]  # of the KL divergence and of the cross-entropy

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum of the losses of a batch's labels, and the sums of the metrics."""
        loss, sums = self._loss(model, batch)
        return loss, {"kl": sums[0], "cross_entropy": sums[1]}

    @torch.no_grad()
    def validate(self, model: nn.Module, batches: BatchLoader, num_batches: int, mesh: Mesh) -> dict[str, float]:
        """Returns the mean loss, KL divergence and cross-entropy of the same held-out batches each time. They are equal on all
        ranks."""
        total = torch.zeros(3, device=batches.device, dtype=collectives.sum_dtype(batches.device))
        for microbatches in batches.first_batches(num_batches):
            for batch in microbatches:
                _, sums = self._loss(model, batch)
                total[:2] += sums
                total[2] += num_valid(batch.labels)
        total = collectives.all_reduce_sum(total, mesh.loss_groups)
        means = means_of(total[:2], total[2])
        loss = sum(weight * mean for weight, mean in zip(self.weights, means, strict=True))
        return {"loss": loss, "kl": means[0], "cross_entropy": means[1]}

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs = {name: value for name, value in batch.inputs.items() if not name.startswith("teacher_")}
        with self.targets(batch) as self.loss.teacher:
            loss = model(**inputs, labels=batch.labels)
        self.loss.teacher = None
        assert self.loss.sums is not None
        return loss, self.loss.sums
