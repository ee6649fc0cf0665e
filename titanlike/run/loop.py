"""What the training loops of the programs share: the loss and its gradients, and what is measured at intervals."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlike.config.sections import Parallelism, Profiling, Training
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.distributed import collectives
from titanlike.distributed.watchdog import Watchdog
from titanlike.inference.evaluator import Evaluator
from titanlike.losses.cross_entropy import means_of, num_valid
from titanlike.metrics import Monitor
from titanlike.models.common.layers import attention_backend
from titanlike.optim.clipping import unscale_gradients
from titanlike.parallelisms.mesh import Mesh
from titanlike.recipe import PretrainRecipe
from titanlike.run.run_dir import RunDirectory

COLLECTION_INTERVAL = 50  # steps

# Returns the loss, and other values, of this number of batches.
Validate = Callable[[nn.Module, BatchLoader, int, Mesh], Mapping[str, float]]


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


@contextmanager
def trace_steps(
    section: Profiling, run: Path, device: torch.device, monitor: Monitor
) -> Iterator[Callable[[int], None]]:
    """Traces the steps that `[profiling]` names. Yields a function to call at the beginning of each step."""
    if not section.steps and not section.memory:
        yield lambda step: None
        return
    from titanlike.metrics.profiler import Profiler

    with Profiler(section, run, device, monitor.exclude_from_throughput) as profiler:
        yield profiler.step


def num_labels(microbatches: Sequence[Batch]) -> Tensor:
    """Returns the number of tokens of this rank's micro-batches that have a loss."""
    return torch.stack([num_valid(batch.labels) for batch in microbatches]).sum()


def forward_backward(
    model: nn.Module,
    microbatches: Sequence[Batch],
    num_tokens: Tensor,
    mesh: Mesh,
    parallelism: Parallelism,
    loss_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of the mean loss over the `num_tokens` of the global batch. Returns that loss, and this rank's share
    of it.

    All tokens have the same weight, whatever their rank and micro-batch: each sum of losses is divided by the global count. The
    backward pass is that of the loss times `loss_scale`; gradients are divided by it.
    """
    if mesh.pipeline.size() > 1:
        local_loss = cast(Any, model).forward_backward(microbatches, lambda loss: loss / num_tokens * loss_scale)
        local_loss /= loss_scale
    else:
        local_loss = torch.zeros((), device=num_tokens.device)
        batches: Iterable[Batch] = microbatches
        if isinstance(model, FSDPModule):
            from titanlike.parallelisms.fsdp import accumulate_gradients

            batches = accumulate_gradients(model, microbatches, parallelism.gradient_sync)
        for batch in batches:
            loss = model(**batch.inputs, labels=batch.labels) / num_tokens
            loss.backward(torch.full_like(loss, loss_scale))
            local_loss += loss.detach()
    unscale_gradients(model, loss_scale)
    return collectives.all_reduce_sum(local_loss.clone(), [*mesh.loss_groups, mesh.pipeline.get_group()]), local_loss


@torch.no_grad()
def validate(model: nn.Module, batches: BatchLoader, num_batches: int, mesh: Mesh) -> float:
    """Returns the mean loss per token of the same held-out batches each time. It is equal on all ranks."""
    total, num_tokens = torch.zeros(2, device=batches.device, dtype=collectives.sum_dtype(batches.device))
    for microbatches in batches.first_batches(num_batches):
        if mesh.pipeline.size() > 1:
            total += cast(Any, model).evaluate(microbatches)
        else:
            total += sum(model(**batch.inputs, labels=batch.labels) for batch in microbatches)
        num_tokens += sum(num_valid(batch.labels) for batch in microbatches)
    collectives.all_reduce_sum(total, [*mesh.loss_groups, mesh.pipeline.get_group()])
    return means_of(total[None], collectives.all_reduce_sum(num_tokens, mesh.loss_groups))[0]


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether an action with this interval is due at this step. The last step is always due."""
    return step == last or (interval > 0 and step % interval == 0)


class Measurements:
    """The validation loss, the scores of tasks and the samples of a run, recorded after the steps at which they are due."""

    def __init__(
        self,
        recipe: PretrainRecipe,
        model: nn.Module,
        mesh: Mesh,
        validation: BatchLoader | None,
        evaluator: Evaluator | None,
        monitor: Monitor,
        watchdog: Watchdog,
        validate: Validate = lambda *arguments: {"loss": validate(*arguments)},
    ) -> None:
        self.section, self.last_step = recipe.validation, recipe.training.steps
        self.model, self.mesh = model, mesh
        self.validation, self.evaluator, self.monitor, self.watchdog = validation, evaluator, monitor, watchdog
        self.validate = validate

    def after(self, step: int) -> None:
        """Measures what is due after a step."""
        self._validate(step)
        self._evaluate(step)

    def missing(self, run: RunDirectory, step: int) -> None:
        """Measures what an earlier start of the run has not: a signal may have ended it after this step."""
        lacks_loss, lacks_scores = (
            run.lacks_record(step, "validation_loss"),
            run.lacks_record(step, "evaluation/", "sample"),
        )
        if lacks_loss:
            self._validate(step)
        if lacks_scores:
            self._evaluate(step)

    def _validate(self, step: int) -> None:
        if self.validation and is_due(step, self.section.interval, self.last_step):
            with self.monitor.exclude_from_throughput("validating"), self.watchdog.pause(self.model):
                values = self.validate(self.model, self.validation, self.section.batches, self.mesh)
                self.monitor.validation(step, **values)

    def _evaluate(self, step: int) -> None:
        if self.evaluator and self.evaluator.is_due(step):
            with self.monitor.exclude_from_throughput("evaluating"), self.watchdog.pause(self.model):
                self.monitor.evaluation(step, self.evaluator(step, self.model, self.mesh))
