"""Changes of a recipe that the planner evaluates: which there are, and applying one. Does not import torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from titanlike.config.base import divisors, show_value
from titanlike.config.effect import drop_overridden
from titanlike.config.layout import SCHEDULES
from titanlike.models.moe.config import MoeConfig
from titanlike.recipe import PretrainRecipe
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job

Changes = Mapping[str, Any]
"""New values of keys, such as {"parallelism.tensor": 8}."""

CHANGES_ROUNDING = ("float8.", "optimizer.state_dtype", "training.reduce_dtype")
"""Keys with an effect on the result of training beyond the order of sums."""

CHECKPOINTING_MODES = ("none", "selective", "full")
MAX_MICROBATCH_SIZES = 6

HOST_MEMORY, OFFLOADED_BYTES = 256 * 2**30, 10
"""Memory of a host for each of its GPUs, as cloud providers have, and bytes of a parameter there with quantized states."""


def apply(recipe: PretrainRecipe, changes: Changes) -> PretrainRecipe:
    """Returns the recipe with some keys changed."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    changed = replace(recipe, **{name: replace(getattr(recipe, name), **keys) for name, keys in sections.items()})
    return drop_overridden(changed, dict.fromkeys(changes, 2))[0]


def text_of(changes: Changes) -> str:
    """Returns changes as a sentence has them: "parallelism.tensor = 8 and compile.mode = 'block'"."""
    if not changes:
        return ""
    *others, last = [f"{name} = {show_value(value)}" for name, value in changes.items()]
    return f"{', '.join(others)} and {last}" if others else last


def changes_rounding(changes: Changes) -> bool:
    """Whether the changed recipe trains with other rounding."""
    return any(name.startswith(CHANGES_ROUNDING) for name in changes)


def single_changes(job: Job, hardware: Hardware) -> Iterator[Changes]:
    """Yields changes of one setting that may make a job faster or smaller, whether valid or not."""
    both: Changes = {"activation_checkpoint.mode": "full", "activation_checkpoint.offload": True}
    for group in (checkpointing(job), [both], microbatch_sizes(job), tensor_degrees(job, hardware), layouts(job)):
        yield from group
    recipe, layout = job.recipe, job.layout
    if recipe.compile.mode == "none" and recipe.run.allows_cuda:
        yield {"compile.mode": "block"}
    if recipe.float8.scaling == "none" and hardware.float8_tflops:
        yield {"float8.scaling": "tensorwise"}
        yield {"float8.scaling": "tensorwise", "float8.all_gather": True}
    elif recipe.float8.scaling == "tensorwise" and not recipe.float8.all_gather:
        yield {"float8.all_gather": True}
    if layout.tensor > 1 and not layout.async_tensor_parallel:
        yield {"parallelism.async_tensor_parallel": True}
    if layout.cpu_offload:
        yield {"parallelism.cpu_offload": False}
    for mode in ("always", "never"):
        if layout.reshard_after_forward != mode:
            yield {"parallelism.reshard_after_forward": mode}
    if job.num_microbatches > 1 and layout.pipeline == 1:
        other = {"each_microbatch": "last_microbatch", "last_microbatch": "each_microbatch"}[layout.gradient_sync]
        yield {"parallelism.gradient_sync": other}
    if recipe.training.reduce_dtype == "float32":
        yield {"training.reduce_dtype": "bfloat16"}
    yield from smaller_states(job)


def smaller_states(job: Job) -> Iterator[Changes]:
    """Yields changes that save memory without a gain in speed."""
    recipe = job.recipe
    if recipe.training.loss_chunk == 0 or recipe.training.loss_chunk > 1024:
        yield {"training.loss_chunk": 1024}
    state_dtype = getattr(recipe.optimizer, "state_dtype", None)  # a program may have another optimizer
    if state_dtype == "full":
        yield {"optimizer.state_dtype": "bfloat16"}
    if state_dtype in ("full", "bfloat16"):
        yield {"optimizer.state_dtype": "8bit"}


def checkpointing(job: Job) -> Iterator[Changes]:
    """Yields other modes of activation checkpointing, then offload."""
    section = job.recipe.activation_checkpoint
    for mode in CHECKPOINTING_MODES:
        if mode != section.mode:
            yield {"activation_checkpoint.mode": mode}
    yield {"activation_checkpoint.offload": not section.offload}


def microbatch_sizes(job: Job) -> Iterator[Changes]:
    """Yields other numbers of sequences in a micro-batch, nearest first."""
    share = job.recipe.training.global_batch_size // job.num_data_ranks
    others = [size for size in divisors(share) if size != job.sequences]
    others.sort(key=lambda size: max(size, job.sequences) / min(size, job.sequences))
    for size in others[:MAX_MICROBATCH_SIZES]:
        yield {"training.local_batch_size": size}


def tensor_degrees(job: Job, hardware: Hardware) -> Iterator[Changes]:
    """Yields other tensor-parallel degrees, within a node."""
    for degree in divisors(hardware.gpus_per_node):
        if degree != job.layout.tensor:
            yield {"parallelism.tensor": degree, **_inferred_shard(job)}


def layouts(job: Job) -> Iterator[Changes]:
    """Yields other degrees of the other dimensions of the layout, and other pipeline schedules."""
    layout = job.layout
    for name in ("pipeline", "context", "replicate"):
        degree = getattr(layout, name)
        for other in {1, degree // 2, degree * 2, degree * 4} - {0, degree}:
            yield {f"parallelism.{name}": other, **_inferred_shard(job)}
    for expert in expert_sizes(job.recipe, job.num_shards):
        if expert != layout.expert:
            yield {"parallelism.expert": expert}
    if layout.pipeline > 1:
        for schedule in SCHEDULES:
            if schedule != layout.pipeline_schedule:
                yield {"parallelism.pipeline_schedule": schedule}


def expert_sizes(recipe: PretrainRecipe, num_shards: int) -> list[int]:
    """Returns the sizes of expert parallelism that divide the experts and the ranks of shard x context: 1 without experts."""
    model = recipe.model
    return divisors(math.gcd(model.num_experts, num_shards)) if isinstance(model, MoeConfig) else [1]


def _inferred_shard(job: Job) -> Changes:
    """The change that lets `shard` follow the other dimensions, if the recipe has a number there."""
    return {} if job.recipe.parallelism.shard == -1 else {"parallelism.shard": -1}


def combinations(job: Job, hardware: Hardware) -> Iterator[list[dict[str, Any]]]:
    """Yields groups of combined changes that save memory, from the least intrusive: checkpointing, micro-batch, layout and what
    FSDP keeps; then the states of the optimizer too; then host memory."""
    recipe = job.recipe
    base: dict[str, Any] = {"activation_checkpoint.mode": "full"} | dict(_inferred_shard(job))
    if recipe.training.loss_chunk == 0:
        base["training.loss_chunk"] = 1024
    if job.layout.replicate > 1:
        base["parallelism.replicate"] = 1
    if job.layout.reshard_after_forward == "never":
        base["parallelism.reshard_after_forward"] = "auto"
    if job.layout.gradient_sync == "last_microbatch":
        base["parallelism.gradient_sync"] = "each_microbatch"
    sizes = product({1, job.sequences}, divisors(hardware.gpus_per_node), (1, 2, 4, 8, 16), (1, 2, 4, 8))
    group = [
        {
            **base,
            "training.local_batch_size": sequences,
            "parallelism.tensor": tensor,
            "parallelism.pipeline": pipeline,
            "parallelism.context": context,
        }
        for sequences, tensor, pipeline, context in sizes
    ]
    if isinstance(recipe.model, MoeConfig):  # in a node, without and with expert parallelism
        experts = (1, math.gcd(recipe.model.num_experts, hardware.gpus_per_node))
        group = [changes | {"parallelism.expert": expert} for changes in group for expert in experts]
    group = [_differing(recipe, changes) for changes in group]
    yield group
    state = {} if getattr(recipe.optimizer, "state_dtype", "8bit") == "8bit" else {"optimizer.state_dtype": "8bit"}
    if state:
        yield [changes | state for changes in group]
    if not job.layout.cpu_offload and recipe.model.num_parameters() * OFFLOADED_BYTES / job.num_gpus <= HOST_MEMORY:
        yield [changes | state | {"parallelism.cpu_offload": True} for changes in group]


def _differing(recipe: PretrainRecipe, changes: Changes) -> dict[str, Any]:
    """Returns the changes without those to the value that the recipe has."""
    return {name: value for name, value in changes.items() if value != value_of(recipe, name)}


def value_of(recipe: PretrainRecipe, name: str) -> Any:
    """Returns the value of a key."""
    section, _, key = name.partition(".")
    return getattr(getattr(recipe, section), key)
