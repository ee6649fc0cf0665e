"""Memory of a training step, from the real model and transforms on fake tensors in a process group without other processes.

Fake tensors have a shape, a dtype and a storage of a known size, but no data. A storage is in use while a tensor refers to it, as
on a GPU. What CUDA kernels allocate for themselves is not seen, nor is the fragmentation of the caching allocator.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tests.simulated_memory.build import build, fake_batch
from tests.simulated_memory.compiled import saved_by_blocks
from tests.simulated_memory.fake_operators import balanced_experts, gpu_operators
from tests.simulated_memory.fakes import fake_process_group, fake_tensors
from tests.simulated_memory.storage_tracker import Allocation, StorageTracker, is_gathered
from titanlike.config import UserError
from titanlike.config.sections import Float8
from titanlike.models.registry import blocks
from titanlike.optim.clipping import clip_gradients, gradient_norms
from titanlike.optim.optimizer import build_optimizer
from titanlike.parallelisms.fsdp import accumulate_gradients
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.pipeline import Pipeline
from titanlike.recipe.distill import DistillRecipe
from titanlike.run.distillation import Teacher, set_distillation_loss
from titanlike.run.second_model import parallelize_frozen
from titanlike.tools.planning.activations import block_activations, weight_copies
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.memory import (
    WORKSPACES,
    Memory,
    Moment,
    Usage,
    fragmentation,
    head_gradient,
    loss_logits,
    memory,
    receive_buffers,
    scattered,
    states,
)
from titanlike.tools.planning.schedules import order, peak_in_flight

# Blocks of a simulated model; with one more, the change for each further block is known. FSDP gathers up to three units at a time,
# but all units of a pipeline stage.
DEPTH, DEPTH_OF_STAGES = 3, 1
MICROBATCHES = 2  # of a simulated step without a pipeline: the second one finds the gradients of the first

Moments = tuple[Moment, ...]


def simulate(job: Job, rank: int = 0, device: Literal["cuda", "cpu"] = "cuda") -> Memory:
    """Returns the memory of a pipeline rank. Simulates stages of a few blocks, and extrapolates to the full depth.

    Args:
        device: whose operators to assume, where GPUs and CPUs save different tensors for the backward pass.
    """
    if job.recipe.compile.mode != "none":
        recipe = replace(job.recipe, compile=replace(job.recipe.compile, mode="none"))
        if not recipe.float8.all_gather:  # casts in eager code need memory, those in compiled code do not
            recipe = replace(recipe, float8=Float8())
        eager = replace(job, recipe=recipe)
        return _as_compiled(simulate(eager, rank, device), eager, job)
    if job.layout.cpu_offload:
        section = replace(job.recipe.parallelism, cpu_offload=False)
        found = simulate(replace(job, recipe=replace(job.recipe, parallelism=section)), rank, device)
        on_host = {"parameters": 0, "gradients": 0, "optimizer": 0}
        moments = tuple(replace(m, usage=replace(m.usage, **on_host)) for m in found.moments)
        return replace(found, moments=moments)
    checkpointing = job.recipe.activation_checkpoint
    if checkpointing.offload:
        without = replace(checkpointing, offload=False)
        return _as_offloaded(replace(job, recipe=replace(job.recipe, activation_checkpoint=without)), job, rank, device)
    if job.layout.pipeline > 1:
        shorter = _with_microbatches(job, rank)
        simulated = _of_full_depth(shorter, rank, device, DEPTH_OF_STAGES)
        # torch allocates the buffers in which a stage receives for all micro-batches at once.
        more = (job.num_microbatches - shorter.num_microbatches) * receive_buffers(job, rank)
        moments = tuple(replace(m, usage=replace(m.usage, gathered=m.usage.gathered + more)) for m in simulated.moments)
        return replace(simulated, moments=moments)
    return _of_full_depth(job, rank, device, DEPTH)


def _as_compiled(simulated: Memory, eager: Job, compiled: Job) -> Memory:
    """Returns the memory with compiled blocks: with what these keep, and otherwise by what the formulas of the two differ."""
    before, after = block_activations(eager), block_activations(compiled)
    share = _saved_by_compiled(compiled) / _saved(eager)
    tokens = compiled.tokens
    logits = loss_logits(eager) - loss_logits(compiled)
    backward = tokens * (after.kept - after.saved + after.backward - (before.kept - before.saved + before.backward))

    def changed(moment: Moment) -> Moment:
        usage = moment.usage
        usage = replace(usage, activations=round(usage.activations * share))
        if moment.label == "loss":
            usage = replace(usage, loss=usage.loss - logits)
        if moment.label == "backward, loss" and compiled.trains_on_pairs:
            before, after = (max(loss_logits(each), head_gradient(each)) for each in (eager, compiled))
            usage = replace(usage, temporary=round(usage.temporary - before + after))
        if moment.label.startswith("backward") and moment.label != "backward, loss":
            usage = replace(usage, temporary=max(0, round(usage.temporary + backward)))
        return Moment(moment.label, usage)

    return replace(simulated, moments=tuple(map(changed, simulated.moments)))


def _saved_by_compiled(job: Job) -> float:
    """Returns the bytes that all blocks save if they are compiled, from one block of each kind."""
    kinds, recipe = job.recipe.model.kinds_of_blocks(), job.recipe
    parallelism = replace(job.layout, pipeline=1, pipeline_split=())
    model: Any = recipe.model
    if not model.is_encoder_decoder:
        model = replace(model, num_layers=model.num_dense_layers + 1)
    short = replace(recipe, model=model, parallelism=parallelism)
    found = saved_by_blocks(Job(short, job.num_gpus // job.layout.pipeline))
    return sum(number * found[first] for (_, number), (first, _) in zip(kinds, model.kinds_of_blocks(), strict=True))


def _saved(job: Job) -> float:
    """Returns the bytes that all blocks save, from formulas."""
    kinds = job.recipe.model.kinds_of_blocks()
    return sum(
        number * (block_activations(job, first).saved * job.tokens_of(first) + weight_copies(job, first)[1])
        for first, number in kinds
    )


def _as_offloaded(job: Job, offloading: Job, rank: int, device: Literal["cuda", "cpu"]) -> Memory:
    """Returns the memory of a job that offloads activations, by what the formulas of the two differ."""
    saved = [{m.label: m.usage.activations for m in memory(each, rank).moments} for each in (job, offloading)]
    highest = max(saved[0].values()) - max(saved[1].values())

    def changed(moment: Moment) -> Moment:
        less = saved[0][moment.label] - saved[1][moment.label] if moment.label in saved[0] else highest
        usage = moment.usage
        return replace(moment, usage=replace(usage, activations=max(0, usage.activations - less)))

    found = simulate(job, rank, device)
    return replace(found, moments=tuple(map(changed, found.moments)), scattered=scattered(offloading))


def _of_full_depth(job: Job, rank: int, device: str, depth: int) -> Memory:
    """Simulates stages of `depth` blocks and of one more, and returns the memory of the full ones."""
    depths = [job.split[stage] for stage in job.stages(rank)]
    # The blocks of an encoder and a decoder do not continue each other.
    if max(depths) <= depth + 1 or job.recipe.model.is_encoder_decoder:
        return Memory(_moments(_step(job, rank, device), device), fragmentation(job))
    # With experts in all blocks. Those that have none are the first.
    uniform = job
    if job.recipe.model.num_dense_layers:
        model = replace(cast(Any, job.recipe.model), num_dense_layers=0)
        uniform = replace(job, recipe=replace(job.recipe, model=model))
    small, large = (_moments(_step(_with_depth(uniform, each), rank, device), device) for each in (depth, depth + 1))
    more = sum(depths) / len(depths) - (depth + 1)
    moments = _extrapolate(small, large, more, job.split[0] if len(job.split) == 1 else 0)
    if uniform is not job:
        before, after = states(uniform, rank), states(job, rank)
        moments = [Moment(moment.label, _with_states(moment.usage, before, after)) for moment in moments]
    return Memory(tuple(moments), fragmentation(job))


def _with_states(usage: Usage, before: Usage, after: Usage) -> Usage:
    """Returns a usage with as many parameters, gradients and states of the optimizer as `after` has, relative to `before`."""
    names = ("parameters", "gradients", "optimizer")
    shares = {name: getattr(after, name) / max(1, getattr(before, name)) for name in names}
    return replace(usage, **{name: round(getattr(usage, name) * share) for name, share in shares.items()})


def _with_depth(job: Job, depth: int) -> Job:
    """Returns the job with `depth` blocks in each pipeline stage."""
    split = [depth] * len(job.split)
    recipe = job.recipe
    model = replace(cast(Any, recipe.model), num_layers=sum(split) - recipe.model.num_mtp_layers)
    parallelism = replace(recipe.parallelism, pipeline_split=tuple(split) if len(split) > 1 else ())
    return replace(job, recipe=replace(recipe, model=model, parallelism=parallelism))


def _with_microbatches(job: Job, rank: int) -> Job:
    """Returns the job with the fewest micro-batches with which a pipeline rank has as many in flight as with all of them, and has
    them after its first backward pass: from then on it also has gradients."""
    layout, stages = job.layout, len(job.split)

    def in_flight(count: int) -> int:
        try:
            return peak_in_flight(order(layout.pipeline_schedule, layout.pipeline, stages, count)[rank])
        except UserError:  # the schedule does not support this number
            return 0

    target = in_flight(job.num_microbatches)
    counts = [n for n in range(1, job.num_microbatches + 1) if in_flight(n) == target]
    training = replace(job.recipe.training, global_batch_size=counts[:2][-1] * job.sequences * job.num_data_ranks)
    return replace(job, recipe=replace(job.recipe, training=training))


def _extrapolate(small: Moments, large: Moments, more: float, num_blocks: int) -> list[Moment]:
    """Continues the usage of stages of `DEPTH` and `DEPTH` + 1 blocks to `more` blocks."""
    first, second = ({moment.label: asdict(moment.usage) for moment in moments} for moments in (small, large))

    def linear(label: str, *terms: tuple[float, Mapping[str, int]]) -> Moment:
        usage = {name: round(sum(factor * term[name] for factor, term in terms)) for name in asdict(Usage())}
        return Moment(label, Usage(**usage))

    moments = []
    for label, usage in second.items():
        kind, _, index = label.partition(", block ")
        if not index or not num_blocks:
            moments.append(linear(label, (1 + more, usage), (-more, first[label])))
            continue
        # The usage of a block between the first and the last is linear in the number of blocks before it and after it.
        middle = first[f"{kind}, block 1"]
        before, after = second[f"{kind}, block 2"], second[f"{kind}, block 1"]
        if index == "0":
            moments.append(linear(label, (1, usage), (more, after), (-more, middle)))
        elif index == str(DEPTH):
            moments.append(linear(f"{kind}, block {num_blocks - 1}", (1, usage), (more, before), (-more, middle)))
        elif index == "1":
            order = range(1, num_blocks - 1)
            for block in order if kind == "forward" else reversed(order):
                terms = ((1, middle), (block - 1, before), (1 - block, middle))
                rest = num_blocks - 2 - block
                moments.append(linear(f"{kind}, block {block}", *terms, (rest, after), (-rest, middle)))
    return moments


def _moments(tracker: StorageTracker, device: str) -> Moments:
    """Returns the largest usage in each phase of the last micro-batch or, with a pipeline, of the step."""
    start = max(begin for begin, phase in tracker.phases if phase == "start")
    allocations = [a for a in tracker.allocations if a.size and (a.end is None or a.end > start)]
    changes = [(a.begin, a, 1) for a in allocations] + [(a.end, a, -1) for a in allocations if a.end is not None]
    usage = dict.fromkeys(asdict(Usage()), 0) | {"workspaces": WORKSPACES if device == "cuda" else 0}
    peaks: dict[str, dict[str, int]] = {}
    phases = sorted(tracker.phases)
    for time, allocation, sign in sorted(changes, key=lambda change: change[0]):
        usage[_category(allocation, start)] += sign * allocation.size
        while len(phases) > 1 and phases[1][0] < time:
            phases.pop(0)
        phase = phases[0][1]
        if time > start and sum(usage.values()) >= sum(peaks.get(phase, {}).values()):
            peaks[phase] = dict(usage)
    return tuple(Moment(phase, Usage(**peak)) for phase, peak in peaks.items() if phase != "start")


def _category(allocation: Allocation, start: int) -> str:
    """Returns the field of `Usage` that an allocation counts for. What an earlier micro-batch has left are gradients."""
    phase, freed_in = allocation.phase, allocation.freed_in
    if phase in ("parameters", "optimizer"):
        return phase
    if freed_in == "zero_grad" or allocation.begin < start:
        return "gradients"
    if is_gathered(allocation):
        return "gathered"
    if phase == "loss":
        return "loss"
    if phase.startswith("forward") and freed_in.startswith("backward"):
        return "activations"
    return "temporary"


def _step(job: Job, rank: int, device: str) -> StorageTracker:
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
            gpu_operators(device, training.attention == "auto"),
            balanced_experts(job),
            StorageTracker(read_as=1) as tracker,
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
            _mark_phases(model, tracker)
            batch = fake_batch(job)
            num_tokens = batch.inputs["tokens"].numel()
            if isinstance(model, Pipeline):
                tracker.begin("start")
                model.forward_backward([batch] * job.num_microbatches, lambda loss: loss / num_tokens)
            else:
                count = min(job.num_microbatches, MICROBATCHES)
                for _ in accumulate_gradients(model, range(count), layout.gradient_sync):
                    tracker.begin("start")
                    if job.frozen_forwards or second:
                        tracker.begin(job.second_name)
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
            tracker.begin("clipping")
            clip_gradients(model, gradient_norms(model, mesh.pipeline).total, training.max_norm)
            tracker.begin("optimizer step")
            optimizer.step()
            tracker.begin("zero_grad")
            optimizer.zero_grad()
    return tracker


def _mark_phases(model: nn.Module, tracker: StorageTracker) -> None:
    """Begins a phase at the forward and backward pass of each block, and at the loss."""

    def mark(module: nn.Module, name: str) -> None:
        def before(*_: object) -> None:
            tracker.begin("loss" if name == "loss" else f"forward, {name}")

        def after(_: nn.Module, __: object, out: Tensor | tuple[Tensor, Tensor]) -> None:
            out = out[0] if isinstance(out, tuple) else out  # of a block, which may also return counts
            if out.requires_grad:
                out.register_hook(lambda _: tracker.begin("backward, loss" if name == "loss" else f"backward, {name}"))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    # The stages of a pipeline have blocks of any numbers, which depend on the simulated depth.
    parts = model.parts if isinstance(model, Pipeline) else {None: model}
    for stage, part in parts.items():
        for name, block in blocks(part).items():
            mark(block, f"block {name}" if stage is None else f"stage {stage}")
    output = getattr(model, "output", None)
    if output is not None:
        mark(output, "loss")
