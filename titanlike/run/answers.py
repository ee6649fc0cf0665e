"""The log-probabilities of the answers of preference pairs, under any layout.

Shapes: B sequences, T tokens, S tokens of all context-parallel ranks, P pairs of a sequence at most.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlike.data.batches.loader import Batch
from titanlike.distributed import collectives
from titanlike.distributed.autograd_collectives import all_reduce
from titanlike.losses import IGNORE
from titanlike.losses.preferences import Answers
from titanlike.parallelisms.context import gather_sequence
from titanlike.parallelisms.mesh import Mesh


@dataclass(frozen=True)
class Places:
    """Where the documents of a batch are."""

    index: Tensor  # (B, T): the place of each token's document in its sequence
    document_ids: Tensor  # (B, P, 2)


# Returns the log-probabilities (B, P, 2) of the answers of a batch under the reference model.
Reference = Callable[[Batch, Places], Tensor]


def places_of(batch: Batch, mesh: Mesh) -> Places:
    """Returns the places of the documents of a batch, which context-parallel ranks share."""
    ids = gather_sequence(batch.inputs["document_ids"], 1, mesh.context)  # (B, S)
    index = (ids.diff(dim=1, prepend=ids[:, :1]) != 0).cumsum(1)
    # No sequence has more documents than tokens. Two are a pair.
    document_ids = ids.new_zeros(ids.shape[0], ids.shape[1] + ids.shape[1] % 2).scatter(1, index, ids)
    local = index if mesh.context.size() == 1 else index[:, mesh.position_ids(ids.shape[1]).to(ids.device)]
    return Places(local, document_ids.unflatten(1, (-1, 2)))


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
