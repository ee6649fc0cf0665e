"""Training with preference pairs: their loss and its gradients, and the loss and accuracy of held-out pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlike.config.dpo import Preference
from titanlike.data.batches.dataloaders import DataLoaders
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.distributed import collectives
from titanlike.losses.preferences import preference_loss
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
    recipe: DpoRecipe, model: nn.Module, mesh: Mesh, device: torch.device, data: DataLoaders
) -> "PreferenceObjective":
    """Returns the objective of a recipe, with its reference model. Call it before the weights of the model are restored."""
    return PreferenceObjective(recipe.preference, build_reference(recipe, model, mesh, device, data), mesh)


@dataclass(frozen=True)
class PreferenceObjective:
    """The mean loss of preference pairs, all of which have the same weight, whatever their rank and micro-batch."""

    section: Preference
    reference: Reference | None
    mesh: Mesh

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum of the losses of a batch's pairs, and this rank's part of the sums of the metrics: context-parallel ranks
        compute the same."""
        loss, metrics = self._loss(model, batch)
        sums = {"loss": loss.detach()} | metrics
        return loss, {name: value / self.mesh.context.size() for name, value in sums.items()}

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
