"""Checks of the layout: sizes that its degrees divide, pipeline stages, the batch of a number of processes. Imports no torch."""

import math
from collections.abc import Iterator

from titanlike.config.base import LIMIT, divisors, one_of
from titanlike.config.layout import BLOCK, SCHEDULES
from titanlike.config.sections import Parallelism
from titanlike.float8.selection import token_problems
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks.optimizer import adamw_section, sharded_experts_problem


def layout_problems(recipe: PretrainRecipe, layout: Parallelism) -> Iterator[str]:
    """Yields a sentence for what does not fit a number of processes. Raises `UserError` if they cannot share the batch."""
    training, num_data_ranks, num_ranks = (
        recipe.training,
        layout.replicate * layout.shard,
        layout.shard * layout.context,
    )
    num_microbatches = training.num_microbatches(num_data_ranks)
    profiling, size = recipe.profiling, math.prod(layout.dimensions().values())
    if (profiling.steps or profiling.memory) and min(profiling.ranks, default=0) >= size:
        processes = "1 process" if size == 1 else f"{size} processes"
        yield f"profiling.ranks = {list(profiling.ranks)}: no such rank in a run of {processes}; use ranks below {size}"
    yield from recipe.model.expert_parallel_problems(layout.expert)
    if recipe.model.num_experts and any(group.optimizer == "muon" for group in adamw_section(recipe).groups):
        yield from sharded_experts_problem(recipe, adamw_section(recipe), layout)
    if num_ranks % layout.expert:
        near = [n for n in divisors(num_ranks) if n <= layout.expert][-4:]
        yield (
            f"parallelism.expert = {layout.expert} does not divide the {num_ranks} ranks of shard x context; use {one_of(near)}, "
            "or more ranks"
        )
    sequences_per_rank = training.global_batch_size // num_data_ranks
    yield from _microbatches(recipe, num_microbatches, sequences_per_rank)
    if recipe.float8.scaling != "none":
        yield from token_problems(
            recipe.float8.scaling, sequences_per_rank // num_microbatches, training.seq_len, recipe.parallelism.context
        )
    sequences = training.global_batch_size // num_microbatches  # of a micro-batch of all ranks
    for _, size in training.batch_ramp:
        prefix = f"training.batch_ramp has a size of {size}"
        if size % sequences:
            multiples = [n * sequences for n in (size // sequences, size // sequences + 1) if n]
            yield (
                f"{prefix}, which is no multiple of the {sequences} sequences of a micro-batch on {num_data_ranks} data-parallel "
                f"ranks; use {one_of(multiples)}, or a smaller training.local_batch_size"
            )
        else:
            for problem in _microbatches(recipe, size // sequences, size // num_data_ranks):
                yield f"{prefix}: {problem}"


def divisibility_problems(recipe: PretrainRecipe) -> Iterator[str]:
    """Yields a sentence for sizes that the tensor- and context-parallel degrees do not divide, and options that they exclude."""
    model, parallelism, seq_len = recipe.model, recipe.parallelism, recipe.training.seq_len
    tensor, context = parallelism.tensor, parallelism.context
    sizes = model.tensor_parallel_sizes()
    common = [n for n in divisors(math.gcd(*sizes.values())) if n <= tensor][-8:]
    for name, size in sizes.items():
        if size % tensor:
            larger = -(-size // math.lcm(64, tensor)) * math.lcm(64, tensor)
            or_larger = f", or model.vocab_size = {larger}" if name == "vocab_size" and larger <= LIMIT else ""
            yield f"parallelism.tensor = {tensor} does not divide model.{name} = {size}; use {one_of(common)}{or_larger}"
    chunks = tensor * (2 * context if context > 1 else 1)
    if seq_len % chunks:
        near = [n * chunks for n in (seq_len // chunks, seq_len // chunks + 1)]
        near = [length for length in near if 0 < length <= model.max_seq_len] or [chunks]
        why = "tensor" if context == 1 else "2 x context" if tensor == 1 else "tensor x 2 x context"
        yield f"training.seq_len = {seq_len} is not divisible into {chunks} chunks ({why}); use {one_of(near)}"
    widths = {name.split(".", 2)[-1]: size[1] for name, size in model.matrices().items()}
    rowwise = {name: widths.get(name, 0) for name in model.rowwise_matrices}
    rowwise |= {name: shape[2] for name, shape in model.expert_parameters().items() if name.endswith("w2")}
    rowwise |= {
        name: spec.shape[1] for name, spec in model.first_parameters().items() if spec.style == "colwise_embedding"
    }
    for name, inputs in rowwise.items():
        if adamw_section(recipe).state_dtype == "8bit" and inputs % BLOCK == 0 and inputs % (BLOCK * tensor):
            yield (
                f"optimizer.state_dtype = '8bit' quantizes blocks of {BLOCK} elements, but parallelism.tensor = {tensor} splits "
                f"the {inputs} columns of {name} within a block; use another tensor, or optimizer.state_dtype = 'bfloat16'"
            )
    if parallelism.async_tensor_parallel:
        refused = "parallelism.async_tensor_parallel = true: {}; set it to false".format
        if tensor == 1:
            yield refused("there is nothing to overlap while parallelism.tensor = 1")
        if recipe.compile.mode == "none":
            yield refused("the compiler does the overlapping, but compile.mode = 'none'")
        if not recipe.run.allows_cuda:
            yield refused(f"it requires GPUs with peer-to-peer access, but run.device = '{recipe.run.device}'")
    for key, moves, what in (
        ("parallelism.cpu_offload", parallelism.cpu_offload, "weights"),
        ("activation_checkpoint.offload", recipe.activation_checkpoint.offload, "activations"),
    ):
        if moves and not recipe.run.allows_cuda:
            yield f"{key} = true moves {what} from a GPU to the host, but run.device = '{recipe.run.device}'; set it to false"


def pipeline_problems(recipe: PretrainRecipe) -> Iterator[str]:
    """Yields a sentence for the first thing that is wrong with the pipeline stages, whatever the batch."""
    parallelism, num_layers = recipe.parallelism, recipe.model.num_layers
    if parallelism.pipeline == 1 or any(parallelism.problems()):
        return
    pipeline, name, split = parallelism.pipeline, parallelism.pipeline_schedule, parallelism.pipeline_split
    if mtp := recipe.model.num_mtp_layers:
        yield (
            f"parallelism.pipeline = {pipeline}: model.num_mtp_layers = {mtp} embeds further tokens after the last block, but the "
            "embedding is in the first stage; use parallelism.shard, tensor, context or expert instead, or num_mtp_layers = 0"
        )
        return
    schedule = SCHEDULES[name]
    per_rank = len(split) // pipeline or parallelism.pipeline_stages or schedule.stages_per_rank
    num_stages = per_rank * pipeline
    if schedule.fixed and per_rank != schedule.stages_per_rank:
        yield (
            f"parallelism.pipeline_schedule = '{name}' has {schedule.stages_per_rank} stage(s) on each rank, not {per_rank}; "
            f"use {schedule.stages_per_rank}"
            + (", or another schedule such as 'interleaved_1f1b'" if num_stages <= num_layers else "")
        )
    elif parallelism.pipeline_stages and num_stages > num_layers:
        fitting = num_layers // pipeline
        yield (
            f"parallelism.pipeline_stages x pipeline = {per_rank} x {pipeline} = {num_stages}, but model.num_layers = "
            f"{num_layers}; " + (f"use pipeline_stages = {fitting} or less" if fitting else "reduce pipeline")
        )
    elif not split and num_stages > num_layers:
        yield (
            f"parallelism.pipeline = {pipeline} makes {num_stages} stages with the schedule '{name}', but "
            f"model.num_layers = {num_layers}; use {max(num_layers // per_rank, 1)} or less"
        )
    elif split and sum(split) != num_layers:
        yield (
            f"parallelism.pipeline_split = {list(split)} has {sum(split)} blocks, but model.num_layers = {num_layers}; "
            "make them equal, or remove pipeline_split"
        )
    elif schedule.splits_backward and (recipe.activation_checkpoint.mode, recipe.compile.mode) == ("selective", "none"):
        yield (
            f"parallelism.pipeline_schedule = '{name}' runs two backward passes through a block, and activation_checkpoint.mode "
            "= 'selective' supports one; use mode = 'full', compile.mode = 'block', or the schedule '1f1b'"
        )


def _microbatches(recipe: PretrainRecipe, num_microbatches: int, sequences_per_rank: int) -> Iterator[str]:
    """Whether the pipeline schedule supports this number of micro-batches."""
    pipeline, name = recipe.parallelism.pipeline, recipe.parallelism.pipeline_schedule
    if pipeline == 1:
        return
    num_stages = pipeline * SCHEDULES[name].stages_per_rank
    counts = {size: sequences_per_rank // size for size in divisors(sequences_per_rank)}
    if name in ("1f1b", "dualpipev"):
        supported = num_microbatches >= num_stages
        required = f"{num_stages} or more"
        sizes = [size for size, count in counts.items() if count >= num_stages]
    else:
        # torch's condition for the interleaved schedules; a multiple of the ranks fills the pipeline.
        supported = name in ("gpipe", "zbv") or num_microbatches % max(1, num_microbatches // pipeline) == 0
        # With one micro-batch, FSDP would get gradients of two dtypes from the two parts of the backward pass.
        supported &= num_microbatches > 1 or not SCHEDULES[name].splits_backward
        required = f"a multiple of {pipeline}"
        sizes = [size for size, count in counts.items() if count % pipeline == 0]
    if not supported:
        remedy = (
            f"use training.local_batch_size = {one_of(sizes[-3:])}" if sizes else "raise training.global_batch_size"
        )
        yield (
            f"parallelism.pipeline_schedule = '{name}' over {pipeline} ranks requires {required} micro-batches, but a rank has "
            f"{num_microbatches} ({sequences_per_rank} sequences, training.local_batch_size = {recipe.training.local_batch_size}); "
            f"{remedy}, or another schedule such as 'gpipe'"
        )
