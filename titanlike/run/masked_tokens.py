"""Validation with masked tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from titanlike.data.batches.loader import BatchLoader
from titanlike.losses.accuracy import LossAndAccuracy
from titanlike.parallelisms.mesh import Mesh
from titanlike.run import loop
from titanlike.utils.modules import without_owner


def validate(model: nn.Module, batches: BatchLoader, num_batches: int, mesh: Mesh) -> dict[str, float]:
    """Returns the mean loss of the masked tokens of the same held-out batches each time, and the fraction of them that the model
    predicts. They are equal on all ranks."""
    with loss_and_accuracy(model):
        return loop.validate(model, batches, num_batches, mesh, ("loss", "accuracy"))


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
