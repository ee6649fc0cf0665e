"""What cannot work, said before anything starts: one pure look at the recipe, and one at the files that it names."""

import glob
import os
from pathlib import Path

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.models import Llama
from titanlike.config.sections import one_of


def check(recipe: PretrainRecipe, world_size: int) -> None:
    """Raise `UserError` with one line for each thing in the recipe that cannot work on so many processes."""
    problems = [*_model_problems(recipe), *_schedule_problems(recipe), *_option_problems(recipe)]
    try:
        layout = recipe.parallelism.resolve(world_size)
        recipe.training.num_microbatches(layout.replicate * layout.shard)
    except UserError as problem:
        problems.append(str(problem))
    if problems:
        raise UserError("\n".join(problems))


def check_files(recipe: PretrainRecipe) -> None:
    """Raise `UserError` if the data is not there or the run folder cannot be written. Creates nothing."""
    problems = []
    if recipe.data.source == "text" and not Path(recipe.data.path).exists() and not glob.glob(recipe.data.path):
        problems.append(
            f"data.path = {recipe.data.path!r} does not exist here; give a text file, a folder or a pattern, "
            "or set data.source = 'synthetic' to run without data"
        )
    encoding = recipe.tokenizer.encoding
    if os.sep in encoding and not Path(encoding).is_file():
        problems.append(
            f"tokenizer.encoding = {encoding!r}: there is no such file; put the tokenizer's rank file there, or give the "
            "name of a tiktoken encoding such as 'gpt2', or 'bytes'"
        )
    elif encoding != "bytes" and not Path(encoding).is_file():
        from titanlike.data.tokenizer import check_name  # only here: most recipes do without what it imports

        try:
            check_name(encoding)
        except UserError as problem:
            problems.append(str(problem))
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
    elif isinstance(model, Llama) and model.head_dim % 2:
        problems.append(
            f"model.dim / model.num_heads = {model.head_dim} is odd, but rotary positions turn pairs; change num_heads"
        )
    if isinstance(model, Llama) and model.num_heads % model.num_kv_heads:
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
    if recipe.tokenizer.encoding == "bytes" and model.vocab_size < 257:
        problems.append(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer's 257 tokens; use 257 or more"
        )
    return problems


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
    problems = []
    if recipe.activation_checkpoint.mode == "memory_budget" and recipe.compile.mode == "none":
        problems.append(
            "activation_checkpoint.mode = 'memory_budget' is a choice that the compiler makes, but compile.mode = 'none'; "
            "set compile.mode = 'block', or use activation_checkpoint.mode = 'selective'"
        )
    if recipe.validation.interval and not recipe.data.validation_every:
        problems.append(
            "validation.interval is set, but data.validation_every = 0 holds nothing out; "
            "set validation.interval = 0, or data.validation_every = 50"
        )
    if recipe.data.validation_every == 1:
        problems.append("data.validation_every = 1 holds everything out; use 2 or more, or 0 for nothing")
    if recipe.parallelism.cpu_offload and recipe.run.device == "cpu":
        problems.append(
            "parallelism.cpu_offload = true moves weights from a GPU to the host, but run.device = 'cpu'; set it false"
        )
    return problems
