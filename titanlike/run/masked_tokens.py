"""Validation with masked tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from titanlike.data.batches.loader import BatchLoader
from titanlike.distributed import collectives
from titanlike.losses.accuracy import LossAndAccuracy
from titanlike.losses.cross_entropy import means_of, num_valid
from titanlike.parallelisms.mesh import Mesh
from titanlike.utils.modules import without_owner


@torch.no_grad()
def validate(model: nn.Module, batches: BatchLoader, num_batches: int, mesh: Mesh) -> dict[str, float]:
    """Returns the mean loss of the masked tokens of the same held-out batches each time, and the fraction of them that the model
    predicts. They are equal on all ranks."""
    dtype = collectives.sum_dtype(batches.device)
    totals, num_tokens = torch.zeros(2, device=batches.device, dtype=dtype), torch.zeros((), device=batches.device)
    with loss_and_accuracy(model):
        for microbatches in batches.first_batches(num_batches):
            if mesh.pipeline.size() > 1:
                totals += cast(Any, model).evaluate(microbatches)
            else:
                totals += sum(model(**batch.inputs, labels=batch.labels) for batch in microbatches)
            num_tokens += sum(num_valid(batch.labels) for batch in microbatches)
    collectives.all_reduce_sum(totals, [*mesh.loss_groups, mesh.pipeline.get_group()])
    loss, correct = means_of(totals, collectives.all_reduce_sum(num_tokens.to(dtype), mesh.loss_groups))
    return {"loss": loss, "accuracy": correct}


@contextmanager
def loss_and_accuracy(model: nn.Module) -> Iterator[None]:
    """Has a model return `LossAndAccuracy` for labels in this context."""
    head: Any = getattr(model, "output", None)  # only of the last pipeline stage
    if head is None:
        yield
        return
    head = without_owner(head)
    loss = head.loss
    head.loss = LossAndAccuracy(chunk=loss.chunk, vocab_group=loss.vocab_group)
    try:
        yield
    finally:
        head.loss = loss
