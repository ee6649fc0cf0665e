"""Checks of a recipe before anything starts: for any number of processes, and against this machine. Does not import torch."""

import math
import os
from pathlib import Path

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.base import one_of
from titanlike.config.layout import BLOCK, SCHEDULES
from titanlike.config.load import nearest
from titanlike.config.schema import describe
from titanlike.data.validation import data_problems, missing_data
from titanlike.float8.validation import float8_problems, hardware_problems, token_problems
from titanlike.utils.system import num_gpus


def check_recipe(recipe: PretrainRecipe, world_size: int) -> None:
    """Raises `UserError` with one line for each thing in the recipe that cannot work on this number of processes."""
    problems = [
        *_model_problems(recipe),
        *_schedule_problems(recipe),
        *_option_problems(recipe),
        *data_problems(recipe),
        *_tensor_parallel_problems(recipe),
        *_pipeline_stage_problems(recipe),
        *float8_problems(recipe),
    ]
    try:
        layout = recipe.parallelism.resolve(world_size)
        num_data_ranks = layout.replicate * layout.shard
        num_microbatches = recipe.training.num_microbatches(num_data_ranks)
        sequences_per_rank = recipe.training.global_batch_size // num_data_ranks
        problems += _microbatch_problems(recipe, num_microbatches, sequences_per_rank)
        problems += token_problems(recipe, sequences_per_rank // num_microbatches)
    except UserError as problem:
        problems.append(str(problem))
    if problems:
        raise UserError("\n".join(problems))


def check_machine(recipe: PretrainRecipe) -> None:
    """Raises `UserError` if this machine lacks data, a writable run directory or hardware. Creates nothing."""
    problems = []
    if recipe.run.device == "cpu" or not num_gpus():
        problems += hardware_problems(recipe.float8, "the CPU", None)
        if recipe.training.attention in ("cudnn", "efficient"):
            problems.append(
                f"training.attention = '{recipe.training.attention}' is a kernel for GPUs, but this runs on the CPU; "
                "set training.attention = 'auto'"
            )
    problems += missing_data(recipe)
    folder = Path(recipe.run.dir, recipe.run.name).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        problems.append(
            f"run.dir = {recipe.run.dir!r}: {existing} is a file, not a folder; choose another run.dir or run.name"
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        problems.append(f"run.dir = {recipe.run.dir!r}: {existing} is not writable; choose another run.dir")
    elif recipe.run.name and (folder / "checkpoints").is_file():
        problems.append(f"{folder / 'checkpoints'} is a file, not a folder; remove it, or choose another run.name")
    if problems:
        raise UserError("\n".join(problems))


def _model_problems(recipe: PretrainRecipe) -> list[str]:
    model, seq_len = recipe.model, recipe.training.seq_len
    problems = model.problems()
    if seq_len > model.max_seq_len:
        problems.append(
            f"training.seq_len = {seq_len} is longer than the model's max_seq_len = {model.max_seq_len}; "
            f"use {model.max_seq_len} or less, or raise model.max_seq_len"
        )
    return problems


def _tensor_parallel_problems(recipe: PretrainRecipe) -> list[str]:
    """Sizes that the tensor- and context-parallel degrees do not divide, and options that they exclude."""
    model, parallelism, seq_len = recipe.model, recipe.parallelism, recipe.training.seq_len
    tensor, context = parallelism.tensor, parallelism.context
    problems = []
    sizes = model.tensor_parallel_sizes()
    common = [n for n in range(1, tensor + 1) if all(size % n == 0 for size in sizes.values())]
    for name, size in sizes.items():
        if size % tensor:
            step = math.lcm(64, tensor)
            larger = f", or model.vocab_size = {-(-size // step) * step}" if name == "vocab_size" else ""
            problems.append(
                f"parallelism.tensor = {tensor} does not divide model.{name} = {size}; use {one_of(common)}{larger}"
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
    for name, inputs in rowwise.items():
        if recipe.optimizer.state_dtype == "8bit" and inputs % BLOCK == 0 and inputs % (BLOCK * tensor):
            problems.append(
                f"optimizer.state_dtype = '8bit' quantizes blocks of {BLOCK} elements, but parallelism.tensor = {tensor} splits "
                f"the {inputs} inputs of {name} within a block; use another tensor, or optimizer.state_dtype = 'bfloat16'"
            )
    for name, size in (("tensor", tensor), ("pipeline", parallelism.pipeline)):
        if size > 1 and recipe.compile.mode == "model":
            problems.append(f"compile.mode = 'model' does not support parallelism.{name} = {size}; use 'block'")
    if parallelism.async_tensor_parallel:
        reasons = {
            "there is nothing to overlap while parallelism.tensor = 1": tensor == 1,
            "the compiler does the overlapping, but compile.mode = 'none'": recipe.compile.mode == "none",
            "it requires GPUs with peer-to-peer access, but run.device = 'cpu'": recipe.run.device == "cpu",
        }
        problems += [
            f"parallelism.async_tensor_parallel = true: {reason}; set it to false"
            for reason, holds in reasons.items()
            if holds
        ]
    return problems


def _pipeline_stage_problems(recipe: PretrainRecipe) -> list[str]:
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


def _microbatch_problems(recipe: PretrainRecipe, num_microbatches: int, sequences_per_rank: int) -> list[str]:
    """Whether the pipeline schedule supports this number of micro-batches."""
    parallelism = recipe.parallelism
    pipeline, name = parallelism.pipeline, parallelism.pipeline_schedule
    num_stages = pipeline * SCHEDULES[name].stages_per_rank

    counts = {
        size: sequences_per_rank // size for size in range(1, sequences_per_rank + 1) if sequences_per_rank % size == 0
    }
    if name in ("1f1b", "dualpipev"):
        supported = num_microbatches >= num_stages
        required = f"{num_stages} or more"
        sizes = [size for size, count in counts.items() if count >= num_stages]
    else:
        # torch's condition for the interleaved schedules; a multiple of the ranks fills the pipeline.
        supported = name in ("gpipe", "zbv") or num_microbatches % max(1, num_microbatches // pipeline) == 0
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


def _schedule_problems(recipe: PretrainRecipe) -> list[str]:
    steps, schedule = recipe.training.steps, recipe.schedule
    # A run shorter than its warm-up is a trial and valid; overlapping phases would contradict each other.
    if schedule.decay_steps and schedule.warmup_steps + schedule.decay_steps > steps:
        return [
            f"schedule.warmup_steps + decay_steps = {schedule.warmup_steps} + {schedule.decay_steps} is more than "
            f"training.steps = {steps}; shorten them or train longer"
        ]
    return []


def _option_problems(recipe: PretrainRecipe) -> list[str]:
    """Options that contradict one another."""
    training, optimizer, checkpoint = recipe.training, recipe.optimizer, recipe.checkpoint
    problems = []
    if training.non_finite == "skip" and training.skip_limit >= training.skip_window:
        problems.append(
            f"training.skip_limit = {training.skip_limit} within skip_window = {training.skip_window} steps allows skipping "
            f"every step; use skip_window = {training.skip_limit + 1} or more"
        )
    if optimizer.state_dtype == "bfloat16" and optimizer.beta2 > 0.98:
        problems.append(
            f"optimizer.state_dtype = 'bfloat16' cannot represent a second moment with beta2 = {optimizer.beta2}: the change of "
            "a step is below its precision; use beta2 = 0.98 or less, or state_dtype = '8bit'"
        )
    if optimizer.stochastic_rounding and training.master_dtype != "bfloat16":
        problems.append(
            "optimizer.stochastic_rounding = true has no effect on training.master_dtype = 'float32'; set "
            "training.master_dtype = 'bfloat16', or stochastic_rounding = false"
        )
    if recipe.activation_checkpoint.mode == "memory_budget" and recipe.compile.mode == "none":
        problems.append(
            "activation_checkpoint.mode = 'memory_budget' is implemented by the compiler, but compile.mode = 'none'; "
            "set compile.mode = 'block', or use activation_checkpoint.mode = 'selective'"
        )
    keys = [key.name for key in describe(type(recipe))]
    for key in checkpoint.allow_changed:
        if key not in keys:
            near = nearest(key, keys)
            hint = f"did you mean {near}?" if near else "see --help"
            problems.append(f"checkpoint.allow_changed: {key} is not a key; {hint}")
    if checkpoint.weights != "none" and not checkpoint.enabled:
        problems.append("checkpoint.weights exports the last checkpoint, but checkpoint.enabled = false")
    if checkpoint.weights != "none" and "://" in checkpoint.dir:
        problems.append(
            f"checkpoint.weights requires a local checkpoint.dir, but it is the URL {checkpoint.dir!r}; set checkpoint.weights = "
            "'none', and use `titanlike consolidate` on a copy"
        )
    if recipe.parallelism.cpu_offload and recipe.run.device == "cpu":
        problems.append(
            "parallelism.cpu_offload = true moves weights from a GPU to the host, but run.device = 'cpu'; set it to false"
        )
    return problems
