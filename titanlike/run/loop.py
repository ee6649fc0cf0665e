"""The loss of a step and its gradients, the mean loss of held-out data, and the settings of a process during the loop."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlike.config.sections import Training
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.distributed import collectives
from titanlike.losses.chunked import gradient_factor
from titanlike.losses.cross_entropy import means_of, num_valid
from titanlike.models.common.layers import attention_backend
from titanlike.optim.clipping import unscale_gradients
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelisms.mixed_precision import cast_once
from titanlike.utils.weight_gradients import accumulate_in_place

COLLECTION_INTERVAL = 50  # steps

# Returns the sum of the losses of a micro-batch, and the sums of metrics by name.
Objective = Callable[[nn.Module, Batch], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Loss:
    """The loss of a step."""

    mean: Tensor
    """Over the global batch: the same on all ranks."""
    share: Tensor
    """This rank's part of the mean."""
    count: Tensor
    """Number of tokens in the global batch that have a loss, or of pairs."""
    metrics: dict[str, Tensor]
    """Means of other metrics over the global batch."""


class GarbageCollector:
    """Replaces Python's automatic collection, which stops each rank at a different step and makes all others wait for it."""

    def __init__(self) -> None:
        self.steps = 0

    def __enter__(self) -> "GarbageCollector":
        gc.disable()
        return self

    def step(self) -> None:
        """Collects everything after the first step, which leaves the garbage of the compiler, then young objects at intervals.
        Later collections do not traverse the objects that are alive after the first step."""
        self.steps += 1
        if self.steps == 1:
            gc.collect()
            gc.freeze()
        elif self.steps % COLLECTION_INTERVAL == 0:
            gc.collect(1)

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        gc.enable()


@contextmanager
def loop_settings(training: Training) -> Iterator[GarbageCollector]:
    """The settings of a process during the loop: precision of matmuls, kernel of attention, and garbage collection at the same
    steps on all ranks, with the `step` of what it yields."""
    torch.set_float32_matmul_precision(training.matmul_precision)
    with attention_backend(training.attention), GarbageCollector() as garbage_collector:
        yield garbage_collector


def num_labels(microbatches: Sequence[Batch]) -> Tensor:
    """Returns the number of tokens of this rank's micro-batches that have a loss."""
    return torch.stack([num_valid(batch.labels) for batch in microbatches]).sum()


def sum_over_data(count: Tensor, mesh: Mesh) -> Tensor:
    """Returns the sum of a number over all ranks with different tokens."""
    return collectives.all_reduce_sum(count, mesh.loss_groups)


def language_modeling(model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The objective of most programs: the cross-entropy of the labels."""
    return model(**batch.inputs, labels=batch.labels), {}


def forward_backward(
    model: nn.Module,
    microbatches: Sequence[Batch],
    count: Tensor,
    mesh: Mesh,
    loss_scale: float = 1.0,
    objective: Objective = language_modeling,
) -> Loss:
    """Computes the gradients of the mean loss over the `count` tokens, or pairs, of the global batch. Returns that loss.

    All tokens have the same weight, whatever their rank and micro-batch: each sum of losses is divided by the global count. The
    backward pass starts from the loss times `loss_scale`; gradients are divided by it.
    """
    totals: dict[str, Tensor] = {}
    if mesh.pipeline.size() > 1:
        share = cast(Any, model).forward_backward(microbatches, lambda loss: loss / count * loss_scale)
        totals["loss"] = share / loss_scale
    else:
        batches: Iterable[Batch] = microbatches
        if isinstance(model, FSDPModule):
            from titanlike.parallelisms.fsdp import accumulate_gradients

            batches = accumulate_gradients(model, microbatches, cast(Any, model).gradient_sync)
        factor = torch.full_like(count, loss_scale, dtype=torch.float32) / count
        with gradient_factor(factor), cast_once(model):
            for batch in batches:
                loss, sums = objective(model, batch)
                with accumulate_in_place(not isinstance(model, FSDPModule)):
                    loss.backward(factor.to(loss.dtype))
                for name, value in {"loss": loss.detach(), **sums}.items():
                    totals[name] = totals.get(name, 0.0) + value / count
    unscale_gradients(model, loss_scale)
    means = torch.stack([*totals.values()])
    means = collectives.all_reduce_sum(means, [*mesh.loss_groups, mesh.pipeline.get_group()]).float()
    mean, *others = means.unbind()
    return Loss(mean, totals["loss"].float(), count, dict(zip([*totals][1:], others, strict=True)))


@torch.no_grad()
def validate(
    model: nn.Module, batches: BatchLoader, num_batches: int, mesh: Mesh, names: Sequence[str] = ("loss",)
) -> dict[str, float]:
    """Returns the means over the labels of the same held-out batches each time, by name: of the loss, or of the sums that the model
    returns for labels. They are equal on all ranks."""
    dtype = collectives.sum_dtype(batches.device)
    totals, num_tokens = (torch.zeros(size, device=batches.device, dtype=dtype) for size in ((len(names),), ()))
    for microbatches in batches.first_batches(num_batches):
        if mesh.pipeline.size() > 1:
            totals += cast(Any, model).evaluate(microbatches)
        else:
            totals += sum(model(**batch.inputs, labels=batch.labels) for batch in microbatches)
        num_tokens += sum(num_valid(batch.labels) for batch in microbatches)
    collectives.all_reduce_sum(totals, [*mesh.loss_groups, mesh.pipeline.get_group()])
    return dict(zip(names, means_of(totals, collectives.all_reduce_sum(num_tokens, mesh.loss_groups)), strict=True))


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether an action with this interval is due at this step. The last step is always due."""
    return step == last or (interval > 0 and step % interval == 0)
