"""Training with preference pairs: their loss and its gradients, and the loss and accuracy of held-out pairs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlike.config.dpo import Preference
from titanlike.config.sections import Parallelism
from titanlike.data.batches.dataloaders import DataLoaders
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.distributed import collectives
from titanlike.losses.preferences import preference_loss
from titanlike.optim.clipping import unscale_gradients
from titanlike.parallelisms.mesh import Mesh
from titanlike.recipe.dpo import DpoRecipe
from titanlike.run.answers import Reference, answers_of, places_of
from titanlike.run.reference import build_reference


def num_pairs(microbatches: Sequence[Batch]) -> Tensor:
    """Returns the number of pairs of this rank's micro-batches. Of context-parallel ranks, the one with the start of the rejected
    answer counts a pair."""
    starts = [(batch.inputs["position_ids"] == 0) & (batch.inputs["document_ids"] % 2 == 1) for batch in microbatches]
    return torch.stack([each.sum() for each in starts]).sum()


def build_objective(
    recipe: DpoRecipe, model: nn.Module, mesh: Mesh, parallelism: Parallelism, device: torch.device, data: DataLoaders
) -> "Objective":
    """Returns the objective of a recipe, with its reference model. Call it before the weights of the model are restored."""
    reference = build_reference(recipe, model, mesh, parallelism, device, data)
    return Objective(recipe.preference, reference, mesh, parallelism.gradient_sync)


@dataclass(frozen=True)
class Objective:
    """The mean loss of preference pairs, all of which have the same weight, whatever their rank and micro-batch."""

    section: Preference
    reference: Reference | None
    mesh: Mesh
    gradient_sync: str

    def forward_backward(
        self, model: nn.Module, microbatches: Sequence[Batch], num_pairs: Tensor, loss_scale: float = 1.0
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Computes the gradients of the mean loss over the `num_pairs` of the global batch. Returns that loss, this rank's share of
        it, and the means of the metrics."""
        batches: Iterable[Batch] = microbatches
        if isinstance(model, FSDPModule):
            from titanlike.parallelisms.fsdp import accumulate_gradients

            batches = accumulate_gradients(model, microbatches, self.gradient_sync)
        totals: dict[str, Tensor] = {}
        for batch in batches:
            loss, metrics = self._loss(model, batch)
            (loss / num_pairs * loss_scale).backward()
            for name, value in ({"loss": loss.detach()} | metrics).items():
                # Context-parallel ranks compute the same.
                totals[name] = totals.get(name, 0.0) + value / num_pairs / self.mesh.context.size()
        unscale_gradients(model, loss_scale)
        local_loss = totals["loss"].float()
        sums = collectives.all_reduce_sum(torch.stack([*totals.values()]), self.mesh.loss_groups)
        means = dict(zip(totals, sums.float(), strict=True))
        return means.pop("loss"), local_loss, means

    @torch.no_grad()
    def validate(self, model: nn.Module, batches: BatchLoader, num_batches: int, mesh: Mesh) -> dict[str, float]:
        """Returns the mean loss of the pairs of the same held-out batches each time, and the fraction of them of which the chosen
        answer has the higher reward. They are equal on all ranks."""
        total = torch.zeros(3, device=batches.device, dtype=collectives.sum_dtype(batches.device))
        for microbatches in batches.first_batches(num_batches):
            for batch in microbatches:
                loss, metrics = self._loss(model, batch)
                total[:2] += torch.stack((loss, metrics["rewards/accuracies"])) / mesh.context.size()
            total[2] += num_pairs(microbatches)
        loss, accuracy, count = collectives.all_reduce_sum(total, mesh.loss_groups).tolist()
        return {"loss": loss / count, "accuracy": accuracy / count}

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        places = places_of(batch, self.mesh)
        expected = None if self.reference is None else self.reference(batch, places)
        return preference_loss(self.section, answers_of(model, batch, places, self.mesh), expected)
