"""Memory of a training step, from the real model and transforms on fake tensors in a process group without other processes.

Fake tensors have a shape, a dtype and a storage of a known size, but no data. A storage is in use while a tensor refers to it, as
on a GPU. What CUDA kernels allocate for themselves is not seen, nor is the fragmentation of the caching allocator.
"""

from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from tests.simulated_memory.build import build, fake_batch
from tests.simulated_memory.fake_operators import balanced_experts, gpu_operators
from tests.simulated_memory.fakes import fake_process_group, fake_tensors
from tests.simulated_memory.storage_tracker import Allocation, StorageTracker
from titanlike.optim.clipping import clip_gradients, gradient_norms
from titanlike.optim.optimizer import build_optimizer
from titanlike.parallelisms.fsdp import accumulate_gradients
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.pipeline import Pipeline
from titanlike.recipe.distill import DistillRecipe
from titanlike.run.distillation import Teacher, set_distillation_loss
from titanlike.run.second_model import parallelize_frozen
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import WORKSPACES, Memory, Moment, Usage, fragmentation

MICROBATCHES = 2  # of a simulated step without a pipeline: the second one finds the gradients of the first


def simulate(job: Job, rank: int = 0) -> Memory:
    """Returns the memory of a pipeline rank, whose blocks are not compiled."""
    return Memory(_moments(_step(job, rank)), fragmentation(job))


def _moments(tracker: StorageTracker) -> tuple[Moment, ...]:
    """Returns the moments of the last micro-batch or, with a pipeline, of the step, with the most bytes and the most gradients."""
    start = max(begin for begin, phase in tracker.phases if phase == "start")
    allocations = [a for a in tracker.allocations if a.size and (a.end is None or a.end > start)]
    changes = [(a.begin, a, 1) for a in allocations] + [(a.end, a, -1) for a in allocations if a.end is not None]
    usage = {"gradients": 0, "temporary": 0, "workspaces": WORKSPACES}
    peak = gradients = Usage()
    for time, allocation, sign in sorted(changes, key=lambda change: change[0]):
        usage["gradients" if _is_gradient(allocation, start) else "temporary"] += sign * allocation.size
        now = Usage(**usage)
        if time > start and now.total >= peak.total:
            peak = now
        if time > start and now.gradients > gradients.gradients:
            gradients = now
    return Moment("peak", peak), Moment("most gradients", gradients)


def _is_gradient(allocation: Allocation, start: int) -> bool:
    """Whether it is freed with the gradients, or an earlier micro-batch has left it."""
    is_state = allocation.phase in ("parameters", "optimizer")
    return not is_state and (allocation.freed_in == "zero_grad" or allocation.begin < start)


def _step(job: Job, rank: int) -> StorageTracker:
    """Runs one step of a pipeline rank on fake tensors."""
    recipe, layout = job.recipe, job.layout
    training = recipe.training
    first_rank = rank * (job.num_gpus // layout.pipeline)
    with fake_process_group(first_rank, job.num_gpus):
        mesh = build_mesh("cpu", **layout.dimensions(), expert=layout.expert)
        model = build(job, mesh)
        second: nn.Module | None = None
        teacher, loss = None, None
        if job.second:
            eager = replace(recipe, parallelism=layout, compile=replace(recipe.compile, mode="none"))
            second = parallelize_frozen(
                job.second.recipe.model, eager, mesh,
                loss_reduction="none" if job.trains_on_pairs else "sum",
            )  # fmt: skip
        if second and isinstance(recipe, DistillRecipe):
            teacher = Teacher(second, reshards=layout.reshard_after_forward != "never")
            loss = set_distillation_loss(model, recipe.distillation)
        with (
            fake_tensors(),
            gpu_operators(training.attention == "auto"),
            balanced_experts(job),
            StorageTracker() as tracker,
        ):
            tracker.begin("parameters")
            for each in filter(None, (model, second)):
                each.to_empty(device=torch.device("cpu"))
            tracker.begin("optimizer")
            optimizer = build_optimizer(model, recipe.optimizer)
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            optimizer.step()  # allocates its state
            optimizer.zero_grad()
            batch = fake_batch(job)
            num_tokens = batch.inputs["tokens"].numel()
            if isinstance(model, Pipeline):
                tracker.begin("start")
                model.forward_backward([batch] * job.num_microbatches, lambda loss: loss / num_tokens)
            else:
                count = min(job.num_microbatches, MICROBATCHES)
                for _ in accumulate_gradients(model, range(count), layout.gradient_sync):
                    tracker.begin("start")
                    with ExitStack() as contexts:
                        if teacher and loss:
                            loss.teacher = contexts.enter_context(teacher.logits(batch))
                        elif job.frozen_forwards or second:
                            with torch.no_grad():
                                _ = (second or model)(**batch.inputs, labels=batch.labels)
                        out = model(**batch.inputs, labels=batch.labels)
                    if loss:
                        loss.teacher = loss.sums = None
                    (out.sum() / num_tokens).backward()
                    del out
            clip_gradients(model, gradient_norms(model, mesh.pipeline).total, training.max_norm)
            optimizer.step()
            tracker.begin("zero_grad")
            optimizer.zero_grad()
    return tracker
