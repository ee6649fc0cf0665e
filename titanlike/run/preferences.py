"""Training with preference pairs: the log-probabilities of answers under any layout, and the loss of pairs and its gradients.

Shapes: B sequences, T tokens, S tokens of all context-parallel ranks, P pairs of a sequence at most.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlike.config.dpo import Preference
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.distributed import collectives
from titanlike.distributed.autograd_collectives import all_reduce
from titanlike.models.loss import IGNORE
from titanlike.models.preference_loss import Answers, preference_loss
from titanlike.parallelisms.context import gather_sequence
from titanlike.parallelisms.mesh import Mesh


@dataclass(frozen=True)
class Places:
    """Where the documents of a batch are."""

    index: Tensor  # (B, T): the place of each token's document among those of its sequence
    document_ids: Tensor  # (B, P, 2)


# Returns the log-probabilities (B, P, 2) of the answers of a batch under the reference model.
Reference = Callable[[Batch, Places], Tensor]


def num_pairs(microbatches: Sequence[Batch]) -> Tensor:
    """Returns the number of pairs of this rank's micro-batches. Of context-parallel ranks, the one with the start of the rejected
    answer counts a pair."""
    starts = [(batch.inputs["position_ids"] == 0) & (batch.inputs["document_ids"] % 2 == 1) for batch in microbatches]
    return torch.stack([each.sum() for each in starts]).sum()


def places_of(batch: Batch, mesh: Mesh) -> Places:
    """Returns the places of the documents of a batch, which context-parallel ranks share."""
    ids = gather_sequence(batch.inputs["document_ids"], 1, mesh.context)  # (B, S)
    index = (ids.diff(dim=1, prepend=ids[:, :1]) != 0).cumsum(1)
    # No sequence has more documents than tokens. Two are a pair.
    of_places = ids.new_zeros(ids.shape[0], ids.shape[1] + ids.shape[1] % 2).scatter(1, index, ids)
    local = index if mesh.context.size() == 1 else index[:, mesh.position_ids(ids.shape[1]).to(ids.device)]
    return Places(local, of_places.unflatten(1, (-1, 2)))


def answers_of(model: nn.Module, batch: Batch, places: Places, mesh: Mesh) -> Answers:
    """Returns the log-probabilities of the answers of a batch. Context-parallel ranks get the sums over all of them.

    Args:
        model: returns the loss of each token for labels.
    """
    losses: Tensor = model(**batch.inputs, labels=batch.labels)  # (B, T)
    # In float64, whose rounding hides the order of the additions.
    values = torch.stack((-losses.to(collectives.sum_dtype(losses.device)), (batch.labels != IGNORE).to(losses.dtype)))
    shape = places.document_ids.shape
    size = shape[1] * shape[2]
    first = torch.arange(shape[0], device=losses.device)[:, None] * size
    sums = values.new_zeros(2, shape[0] * size).index_add(1, (places.index + first).flatten(), values.flatten(1))
    if mesh.context.size() > 1:
        sums = all_reduce(sums, mesh.context.get_group())
    return Answers(sums[0].view(shape), sums[1].detach().view(shape))


def forward_backward(
    model: nn.Module,
    reference: Reference | None,
    microbatches: Sequence[Batch],
    num_pairs: Tensor,
    mesh: Mesh,
    sync: str,
    section: Preference,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Computes the gradients of the mean loss over the `num_pairs` of the global batch. Returns that loss, this rank's share of it,
    and the means of the metrics.

    All pairs have the same weight, whatever their rank and micro-batch: each sum of losses is divided by the global count.
    """
    batches: Iterable[Batch] = microbatches
    if isinstance(model, FSDPModule):
        from titanlike.parallelisms.fsdp import accumulate_gradients

        batches = accumulate_gradients(model, microbatches, sync)
    totals: dict[str, Tensor] = {}
    for batch in batches:
        loss, metrics = _loss(model, reference, batch, mesh, section)
        (loss / num_pairs).backward()
        for name, value in ({"loss": loss.detach()} | metrics).items():
            totals[name] = (
                totals.get(name, 0.0) + value / num_pairs / mesh.context.size()
            )  # whose ranks compute the same
    local_loss = totals["loss"].float()
    means = dict(zip(totals, _sum_over_ranks(torch.stack([*totals.values()]), mesh).float(), strict=True))
    return means.pop("loss"), local_loss, means


@torch.no_grad()
def validate(
    model: nn.Module,
    batches: BatchLoader,
    num_batches: int,
    mesh: Mesh,
    *,
    reference: Reference | None,
    section: Preference,
) -> dict[str, float]:
    """Returns the mean loss of the pairs of the same held-out batches each time, and the fraction of them of which the chosen
    answer has the higher reward. They are equal on all ranks."""
    total = torch.zeros(3, device=batches.device, dtype=collectives.sum_dtype(batches.device))
    for microbatches in batches.first_batches(num_batches):
        for batch in microbatches:
            loss, metrics = _loss(model, reference, batch, mesh, section)
            total[:2] += torch.stack((loss, metrics["rewards/accuracies"])) / mesh.context.size()
        total[2] += num_pairs(microbatches)
    loss, accuracy, count = _sum_over_ranks(total, mesh).tolist()
    return {"loss": loss / count, "accuracy": accuracy / count}


def _loss(
    model: nn.Module, reference: Reference | None, batch: Batch, mesh: Mesh, section: Preference
) -> tuple[Tensor, dict[str, Tensor]]:
    places = places_of(batch, mesh)
    expected = None if reference is None else reference(batch, places)
    return preference_loss(section, answers_of(model, batch, places, mesh), expected)


def _sum_over_ranks(values: Tensor, mesh: Mesh) -> Tensor:
    return collectives.all_reduce_sum(values, mesh.loss_groups)
