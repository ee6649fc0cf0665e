"""Checks of a recipe's layout: sizes that do not divide, pipeline stages and micro-batches. Does not import torch."""

import math

from titanlike.config import PretrainRecipe
from titanlike.config.base import LIMIT, divisors, one_of
from titanlike.config.layout import BLOCK, SCHEDULES
from titanlike.config.sections import Optimizer


def tensor_parallel_problems(recipe: PretrainRecipe) -> list[str]:
    """Sizes that the tensor- and context-parallel degrees do not divide, and options that they exclude."""
    model, parallelism, seq_len = recipe.model, recipe.parallelism, recipe.training.seq_len
    tensor, context = parallelism.tensor, parallelism.context
    problems = []
    sizes = model.tensor_parallel_sizes()
    common = [n for n in divisors(math.gcd(*sizes.values())) if n <= tensor][-8:]
    for name, size in sizes.items():
        if size % tensor:
            larger = -(-size // math.lcm(64, tensor)) * math.lcm(64, tensor)
            or_larger = f", or model.vocab_size = {larger}" if name == "vocab_size" and larger <= LIMIT else ""
            problems.append(
                f"parallelism.tensor = {tensor} does not divide model.{name} = {size}; use {one_of(common)}{or_larger}"
            )
    chunks = tensor * (2 * context if context > 1 else 1)
    if seq_len % chunks:
        near = [n * chunks for n in (seq_len // chunks, seq_len // chunks + 1)]
        near = [length for length in near if 0 < length <= model.max_seq_len] or [chunks]
        why = "tensor" if context == 1 else "2 x context" if tensor == 1 else "tensor x 2 x context"
        problems.append(
            f"training.seq_len = {seq_len} is not divisible into {chunks} chunks ({why}); use {one_of(near)}"
        )
    rowwise = {name: model.block_matrices().get(name, (0, 0))[1] for name in model.rowwise_matrices}
    rowwise |= {name: shape[2] for name, shape in model.expert_parameters().items() if name.endswith("w2")}
    for name, inputs in rowwise.items():
        if adamw_section(recipe).state_dtype == "8bit" and inputs % BLOCK == 0 and inputs % (BLOCK * tensor):
            problems.append(
                f"optimizer.state_dtype = '8bit' quantizes blocks of {BLOCK} elements, but parallelism.tensor = {tensor} splits "
                f"the {inputs} inputs of {name} within a block; use another tensor, or optimizer.state_dtype = 'bfloat16'"
            )
    if parallelism.async_tensor_parallel:
        reasons = {
            "there is nothing to overlap while parallelism.tensor = 1": tensor == 1,
            "the compiler does the overlapping, but compile.mode = 'none'": recipe.compile.mode == "none",
            f"it requires GPUs with peer-to-peer access, but run.device = '{recipe.run.device}'": not recipe.run.allows_cuda,
        }
        problems += [
            f"parallelism.async_tensor_parallel = true: {reason}; set it to false"
            for reason, holds in reasons.items()
            if holds
        ]
    return problems


def expert_parallel_problems(recipe: PretrainRecipe, num_ranks: int) -> list[str]:
    """Sizes of expert parallelism that do not divide the experts or the `num_ranks` ranks of shard x context, and options that it
    excludes."""
    expert = recipe.parallelism.expert
    problems = recipe.model.expert_parallel_problems(expert)
    if num_ranks % expert:
        near = [n for n in divisors(num_ranks) if n <= expert][-4:]
        problems.append(
            f"parallelism.expert = {expert} does not divide the {num_ranks} ranks of shard x context; use {one_of(near)}, or more "
            "ranks"
        )
    return problems


def pipeline_stage_problems(recipe: PretrainRecipe) -> list[str]:
    """What is wrong with the pipeline stages, whatever the batch."""
    parallelism, num_layers = recipe.parallelism, recipe.model.num_layers
    pipeline, name = parallelism.pipeline, parallelism.pipeline_schedule
    schedule, per_rank, split = SCHEDULES[name], parallelism.pipeline_stages, parallelism.pipeline_split
    if pipeline == 1:
        key = "pipeline_split" if split else "pipeline_stages" if per_rank > 1 else ""
        return [f"parallelism.{key} is set, but parallelism.pipeline = 1 has one stage; remove it"] if key else []
    if split and per_rank and len(split) != per_rank * pipeline:
        return [
            f"parallelism.pipeline_split has {len(split)} stages, but pipeline_stages x pipeline = {per_rank} x {pipeline}; "
            "remove pipeline_stages"
        ]
    if len(split) % pipeline:
        return [
            f"parallelism.pipeline_split has {len(split)} stages, which pipeline = {pipeline} ranks cannot share equally; "
            f"give {pipeline} or a multiple"
        ]
    if schedule.splits_backward and parallelism.reshard_after_forward == "always":
        # FSDP would free weights between the two parts of a backward pass, and lose gradients.
        return [
            f"parallelism.reshard_after_forward = 'always' loses gradients with pipeline_schedule = '{name}', which computes "
            "weight gradients separately; use 'auto', or another schedule such as 'interleaved_1f1b'"
        ]
    per_rank = len(split) // pipeline or per_rank or schedule.stages_per_rank
    if schedule.fixed and per_rank != schedule.stages_per_rank:
        fits = per_rank * pipeline <= num_layers
        return [
            f"parallelism.pipeline_schedule = '{name}' has {schedule.stages_per_rank} stage(s) on each rank, not {per_rank}; "
            f"use {schedule.stages_per_rank}" + (", or another schedule such as 'interleaved_1f1b'" if fits else "")
        ]
    if parallelism.pipeline_stages and per_rank * pipeline > num_layers:
        fitting = num_layers // pipeline
        return [
            f"parallelism.pipeline_stages x pipeline = {per_rank} x {pipeline} = {per_rank * pipeline}, but model.num_layers = "
            f"{num_layers}; " + (f"use pipeline_stages = {fitting} or less" if fitting else "reduce pipeline")
        ]
    if not split and per_rank * pipeline > num_layers:
        return [
            f"parallelism.pipeline = {pipeline} makes {per_rank * pipeline} stages with the schedule '{name}', but "
            f"model.num_layers = {num_layers}; use {max(num_layers // per_rank, 1)} or less"
        ]
    if split and sum(split) != num_layers:
        return [
            f"parallelism.pipeline_split = {list(split)} has {sum(split)} blocks, but model.num_layers = {num_layers}; "
            "make them equal, or remove pipeline_split"
        ]
    mode = recipe.activation_checkpoint.mode
    if schedule.splits_backward and mode == "selective" and recipe.compile.mode == "none":
        return [
            f"parallelism.pipeline_schedule = '{name}' runs two backward passes through a block, and activation_checkpoint.mode "
            "= 'selective' supports one; use mode = 'full', compile.mode = 'block', or the schedule '1f1b'"
        ]
    return []


def microbatch_problems(recipe: PretrainRecipe, num_microbatches: int, sequences_per_rank: int) -> list[str]:
    """Whether the pipeline schedule supports this number of micro-batches."""
    parallelism = recipe.parallelism
    pipeline, name = parallelism.pipeline, parallelism.pipeline_schedule
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
    if pipeline == 1 or supported:
        return []
    remedy = f"use training.local_batch_size = {one_of(sizes[-3:])}" if sizes else "raise training.global_batch_size"
    return [
        f"parallelism.pipeline_schedule = '{name}' over {pipeline} ranks requires {required} micro-batches, but a rank has "
        f"{num_microbatches} ({sequences_per_rank} sequences, training.local_batch_size = {recipe.training.local_batch_size}); "
        f"{remedy}, or another schedule such as 'gpipe'"
    ]


def batch_ramp_problems(recipe: PretrainRecipe, num_data_ranks: int) -> list[str]:
    """Whether the sizes of the batch-size ramp are made of the same micro-batches as the final size."""
    training = recipe.training
    num_microbatches = training.num_microbatches(num_data_ranks)
    sequences = training.global_batch_size // num_microbatches  # of a micro-batch of all ranks
    problems = []
    for _, size in training.batch_ramp:
        if size % sequences:
            multiples = [n * sequences for n in (size // sequences, size // sequences + 1) if n]
            problems.append(
                f"training.batch_ramp has a size of {size}, which is no multiple of the {sequences} sequences of a micro-batch on "
                f"{num_data_ranks} data-parallel ranks; use {one_of(multiples)}, or a smaller training.local_batch_size"
            )
        else:
            found = microbatch_problems(recipe, size // sequences, size // num_data_ranks)
            problems += [f"training.batch_ramp has a size of {size}: {problem}" for problem in found]
    return problems


def adamw_section(recipe: PretrainRecipe) -> Optimizer:
    """Returns the section of AdamW, with its defaults if the program has another optimizer and a section of its own for it."""
    return recipe.optimizer if isinstance(recipe.optimizer, Optimizer) else Optimizer()
