"""What cannot work, said before anything starts: one pure look at the recipe, and one at the files that it names."""

import math
import os
from pathlib import Path

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.base import one_of
from titanlike.config.layout import BLOCK, SCHEDULES, SPLIT_BY_INPUTS
from titanlike.config.load import nearest
from titanlike.config.model_configs import LlamaConfig
from titanlike.config.schema import describe
from titanlike.data.validation import data_problems, missing_data
from titanlike.float8.validation import float8_problems, hardware_problems, token_problems
from titanlike.utils.system import num_gpus


def check_recipe(recipe: PretrainRecipe, world_size: int) -> None:
    """Raise `UserError` with one line for each thing in the recipe that cannot work on so many processes."""
    problems = [
        *_model_problems(recipe),
        *_schedule_problems(recipe),
        *_option_problems(recipe),
        *data_problems(recipe),
    ]
    problems += [*_tensor_problems(recipe), *_stage_problems(recipe), *float8_problems(recipe)]
    try:
        layout = recipe.parallelism.resolve(world_size)
        num_data_ranks = layout.replicate * layout.shard
        num_microbatches = recipe.training.num_microbatches(num_data_ranks)
        share = recipe.training.global_batch_size // num_data_ranks
        problems += _microbatch_problems(recipe, num_microbatches, share)
        problems += token_problems(recipe, share // num_microbatches)
    except UserError as problem:
        problems.append(str(problem))
    if problems:
        raise UserError("\n".join(problems))


def check_machine(recipe: PretrainRecipe) -> None:
    """Raise `UserError` if this machine lacks what the recipe wants: data, a folder to write to, float8. Creates nothing."""
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
        problems.append(f"run.dir = {recipe.run.dir!r}: {existing} cannot be written to; choose another run.dir")
    elif recipe.run.name and (folder / "checkpoints").is_file():
        problems.append(f"{folder / 'checkpoints'} is a file, not a folder; remove it, or choose another run.name")
    if problems:
        raise UserError("\n".join(problems))


def _model_problems(recipe: PretrainRecipe) -> list[str]:
    model, seq_len = recipe.model, recipe.training.seq_len
    problems = []
    if model.dim % model.num_heads:
        near = [n for n in range(1, min(model.dim, 2 * model.num_heads) + 1) if model.dim % n == 0]
        problems.append(
            f"model.num_heads = {model.num_heads} does not divide model.dim = {model.dim}; use {one_of(near[-4:])}"
        )
    elif isinstance(model, LlamaConfig) and model.head_dim % 2:
        problems.append(
            f"model.dim / model.num_heads = {model.head_dim} is odd, but rotary positions turn pairs; change num_heads"
        )
    if isinstance(model, LlamaConfig) and model.num_heads % model.num_kv_heads:
        divisors = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
        problems.append(
            f"model.num_kv_heads = {model.num_kv_heads} does not divide model.num_heads = {model.num_heads}; "
            f"use {one_of(divisors)}"
        )
    if seq_len > model.max_seq_len:
        problems.append(
            f"training.seq_len = {seq_len} is longer than the model's max_seq_len = {model.max_seq_len}; "
            f"use {model.max_seq_len} or less, or raise model.max_seq_len"
        )
    return problems


def _tensor_problems(recipe: PretrainRecipe) -> list[str]:
    """What does not divide over the ranks that share matrices and sequences."""
    model, parallelism, seq_len = recipe.model, recipe.parallelism, recipe.training.seq_len
    tensor, context = parallelism.tensor, parallelism.context
    problems = []
    shared = {"num_heads": model.num_heads, "vocab_size": model.vocab_size}
    if isinstance(model, LlamaConfig):
        shared |= {"num_kv_heads": model.num_kv_heads, "ffn_dim": model.ffn_dim}
    common = [n for n in range(1, tensor + 1) if all(size % n == 0 for size in shared.values())]
    for name, size in shared.items():
        if size % tensor:
            step = math.lcm(64, tensor)
            larger = f", or model.vocab_size = {-(-size // step) * step}" if name == "vocab_size" else ""
            problems.append(
                f"parallelism.tensor = {tensor} does not divide model.{name} = {size}; use {one_of(common)}{larger}"
            )
    pieces = tensor * (2 * context if context > 1 else 1)
    if seq_len % pieces:
        near = [n * pieces for n in (seq_len // pieces, seq_len // pieces + 1)]
        near = [length for length in near if 0 < length <= model.max_seq_len] or [pieces]
        why = "tensor" if context == 1 else "twice context" if tensor == 1 else "tensor x twice context"
        problems.append(
            f"training.seq_len = {seq_len} does not divide into {pieces} pieces ({why}); use {one_of(near)}"
        )
    cut = {name: inputs for name, (_, inputs) in model.block_matrices().items() if name in SPLIT_BY_INPUTS}
    for name, inputs in cut.items():
        if recipe.optimizer.state_dtype == "8bit" and inputs % BLOCK == 0 and inputs % (BLOCK * tensor):
            problems.append(
                f"optimizer.state_dtype = '8bit' keeps {BLOCK} neighbours together, but parallelism.tensor = {tensor} cuts the "
                f"{inputs} inputs of {name} in between; use another tensor, or optimizer.state_dtype = 'bfloat16'"
            )
    for name, size in (("tensor", tensor), ("pipeline", parallelism.pipeline)):
        if size > 1 and recipe.compile.mode == "model":
            problems.append(f"compile.mode = 'model' does not go with parallelism.{name} = {size}; use 'block'")
    if parallelism.async_tensor_parallel:
        reasons = {
            "there is nothing to overlap while parallelism.tensor = 1": tensor == 1,
            "it is the compiler that overlaps, but compile.mode = 'none'": recipe.compile.mode == "none",
            "it wants GPUs that reach each other's memory, but run.device = 'cpu'": recipe.run.device == "cpu",
        }
        problems += [
            f"parallelism.async_tensor_parallel = true: {reason}; set it false"
            for reason, holds in reasons.items()
            if holds
        ]
    return problems


def _stage_problems(recipe: PretrainRecipe) -> list[str]:
    """What is wrong with the stages of the pipeline, whatever the batch."""
    parallelism, num_layers = recipe.parallelism, recipe.model.num_layers
    pipeline, name = parallelism.pipeline, parallelism.pipeline_schedule
    schedule, per_rank, split = SCHEDULES[name], parallelism.pipeline_stages, parallelism.pipeline_split
    if pipeline == 1:
        given = "pipeline_split" if split else "pipeline_stages" if per_rank > 1 else ""
        return (
            [f"parallelism.{given} is set, but parallelism.pipeline = 1 has one stage; leave it out"] if given else []
        )
    if split and per_rank and len(split) != per_rank * pipeline:
        return [
            f"parallelism.pipeline_split has {len(split)} stages, but pipeline_stages x pipeline = {per_rank} x {pipeline}; "
            "leave out pipeline_stages"
        ]
    if len(split) % pipeline:
        return [
            f"parallelism.pipeline_split has {len(split)} stages, which do not divide over pipeline = {pipeline} ranks; "
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
            f"{num_layers}; " + (f"use pipeline_stages = {fitting} or less" if fitting else "make pipeline smaller")
        ]
    if not split and per_rank * pipeline > num_layers:
        return [
            f"parallelism.pipeline = {pipeline} makes {per_rank * pipeline} stages with the schedule '{name}', but "
            f"model.num_layers = {num_layers}; use {max(num_layers // per_rank, 1)} or less"
        ]
    if split and sum(split) != num_layers:
        return [
            f"parallelism.pipeline_split = {list(split)} has {sum(split)} blocks, but model.num_layers = {num_layers}; "
            "make them equal, or leave it out"
        ]
    mode = recipe.activation_checkpoint.mode
    if schedule.splits_backward and mode == "selective" and recipe.compile.mode == "none":
        return [
            f"parallelism.pipeline_schedule = '{name}' walks a block twice backward, and activation_checkpoint.mode = "
            "'selective' can be recomputed once only; use mode = 'full', compile.mode = 'block', or the schedule '1f1b'"
        ]
    return []


def _microbatch_problems(recipe: PretrainRecipe, num_microbatches: int, share: int) -> list[str]:
    """Whether the pipeline's schedule works with so many micro-batches, of the `share` of sequences that a rank has."""
    parallelism = recipe.parallelism
    pipeline, name = parallelism.pipeline, parallelism.pipeline_schedule
    num_stages = pipeline * SCHEDULES[name].stages_per_rank

    counts = {size: share // size for size in range(1, share + 1) if share % size == 0}
    if name in ("1f1b", "dualpipev"):
        works = num_microbatches >= num_stages
        wants = f"{num_stages} or more"
        sizes = [size for size, count in counts.items() if count >= num_stages]
    else:
        # So says torch of the interleaved ones; to fill the pipeline, it is a multiple of the ranks.
        works = name in ("gpipe", "zbv") or num_microbatches % max(1, num_microbatches // pipeline) == 0
        wants = f"a multiple of {pipeline}"
        sizes = [size for size, count in counts.items() if count % pipeline == 0]
    if pipeline == 1 or works:
        return []
    remedy = f"use training.local_batch_size = {one_of(sizes[-3:])}" if sizes else "raise training.global_batch_size"
    return [
        f"parallelism.pipeline_schedule = '{name}' over {pipeline} ranks wants {wants} micro-batches, but a rank has "
        f"{num_microbatches} ({share} sequences, training.local_batch_size = {recipe.training.local_batch_size}); "
        f"{remedy}, or another schedule such as 'gpipe'"
    ]


def _schedule_problems(recipe: PretrainRecipe) -> list[str]:
    steps, schedule = recipe.training.steps, recipe.schedule
    # A run shorter than its warm-up is a try-out, and works; phases that overlap would not be what either of them says.
    if schedule.decay_steps and schedule.warmup_steps + schedule.decay_steps > steps:
        return [
            f"schedule.warmup_steps + decay_steps = {schedule.warmup_steps} + {schedule.decay_steps} is more than "
            f"training.steps = {steps}; shorten them or train longer"
        ]
    return []


def _option_problems(recipe: PretrainRecipe) -> list[str]:
    problems, training = [], recipe.training
    if training.non_finite == "skip" and training.skip_limit >= training.skip_window:
        problems.append(
            f"training.skip_limit = {training.skip_limit} among skip_window = {training.skip_window} steps lets all be skipped, "
            f"for ever; use skip_window = {training.skip_limit + 1} or more"
        )
    if recipe.optimizer.state_dtype == "bfloat16" and recipe.optimizer.beta2 > 0.98:
        problems.append(
            f"optimizer.state_dtype = 'bfloat16' cannot hold an average with a memory as long as beta2 = {recipe.optimizer.beta2}: "
            "what a step changes is less than its last digit; use beta2 = 0.98 or less, or state = '8bit'"
        )
    if recipe.optimizer.stochastic_rounding and recipe.training.master_dtype != "bfloat16":
        problems.append(
            "optimizer.stochastic_rounding = true, but training.master_dtype = 'float32' rounds nothing that matters; set "
            "training.master_dtype = 'bfloat16', or stochastic_rounding = false"
        )
    if recipe.activation_checkpoint.mode == "memory_budget" and recipe.compile.mode == "none":
        problems.append(
            "activation_checkpoint.mode = 'memory_budget' is a choice that the compiler makes, but compile.mode = 'none'; "
            "set compile.mode = 'block', or use activation_checkpoint.mode = 'selective'"
        )
    checkpoint = recipe.checkpoint
    keys = [key.name for key in describe(type(recipe))]
    for key in checkpoint.allow_changed:
        if key not in keys:
            near = nearest(key, keys)
            problems.append(
                f"checkpoint.allow_changed: {key} is not a key; " + (f"did you mean {near}?" if near else "see --help")
            )
    if checkpoint.weights != "none" and not checkpoint.enabled:
        problems.append("checkpoint.weights takes them from the last checkpoint, but checkpoint.enabled = false")
    if checkpoint.weights != "none" and "://" in checkpoint.dir:
        problems.append(
            f"checkpoint.weights takes them from a folder, but checkpoint.dir = {checkpoint.dir!r} is an address; set it "
            "'none', and use `titanlike consolidate` on a copy"
        )
    if recipe.parallelism.cpu_offload and recipe.run.device == "cpu":
        problems.append(
            "parallelism.cpu_offload = true moves weights from a GPU to the host, but run.device = 'cpu'; set it false"
        )
    return problems
