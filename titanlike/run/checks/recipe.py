"""Checks of a recipe before anything starts: what its sections say together, for any number of processes. A section checks itself
in its method `problems`. Does not import torch."""

from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import entry_points

from titanlike.config import UserError, effect
from titanlike.config.base import nearest, shown
from titanlike.config.schema import describe
from titanlike.float8.selection import selection_problems
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks.attention import attention_problems
from titanlike.run.checks.layout import divisibility_problems, layout_problems, pipeline_problems
from titanlike.run.checks.optimizer import optimizer_problems

# The backends of torch.compile that can train. The names are in torch, which is not imported here.
BACKENDS = ("inductor", "cudagraphs", "aot_eager", "aot_eager_decomp_partition", "eager")


def check_recipe(recipe: PretrainRecipe, world_size: int) -> None:
    """Raises `UserError` with one line for each thing in the recipe that cannot work on this number of processes."""
    problems = [*recipe.problems(), *effect.problems(recipe), *_objective(recipe)]
    for field in fields(recipe):
        section = getattr(recipe, field.name)
        problems += section.problems() if hasattr(section, "problems") else []
    checks = (_lengths, _data, attention_problems, _compiler, optimizer_problems, _checkpoint, divisibility_problems)
    for check in (*checks, pipeline_problems, _float8):
        problems += check(recipe)
    if recipe.run.device == "mps":
        problems += _mps(recipe, world_size)
    try:
        problems += layout_problems(recipe, recipe.parallelism.resolve(world_size))
    except UserError as problem:
        if not any("parallelism." in each for each in problems):  # of which it may be a consequence
            problems.append(str(problem))
    if problems:
        raise UserError("\n".join(problems))


def _objective(recipe: PretrainRecipe) -> Iterator[str]:
    if recipe.model.is_encoder_decoder and not recipe.is_encoder_decoder:
        yield f"model.name = '{recipe.model.name}' has an encoder and a decoder; set program = 'seq2seq'"
    elif recipe.is_encoder_decoder and not recipe.model.is_encoder_decoder:
        yield f"model.name = '{recipe.model.name}' is not an encoder with a decoder; use 't5', or another recipe"
    elif recipe.model.causal and not recipe.causal:
        yield f"model.name = '{recipe.model.name}' predicts the next token; use 'bert' or 'modernbert', or program = 'pretrain'"
    elif recipe.causal and not recipe.model.causal:
        yield f"model.name = '{recipe.model.name}' is an encoder, which predicts masked tokens; set program = 'mlm'"


def _lengths(recipe: PretrainRecipe) -> Iterator[str]:
    training, schedule, max_seq_len = recipe.training, recipe.schedule, recipe.model.max_seq_len
    steps, warmup, decay = training.steps, schedule.warmup_steps, schedule.num_decay_steps(training.steps)
    if training.seq_len > max_seq_len:
        yield (
            f"training.seq_len = {training.seq_len} is longer than the model's max_seq_len = {max_seq_len}; "
            f"use {max_seq_len} or less, or raise model.max_seq_len"
        )
    if warmup > steps:
        yield (
            f"schedule.warmup_steps = {warmup} is more than training.steps = {steps}, so the learning rate would "
            f"not reach its peak; use schedule.warmup_steps = {steps} or less, or train longer"
        )
    elif schedule.decay_ratio and warmup + decay > steps:
        yield (
            f"schedule.warmup_steps = {warmup} and schedule.decay_ratio = {schedule.decay_ratio}, which is "
            f"{decay} steps, are more than training.steps = {steps}; shorten them or train longer"
        )


def _data(recipe: PretrainRecipe) -> Iterator[str]:
    data = recipe.data
    if recipe.tokenizer.encoding == "bytes" and recipe.model.vocab_size < 257:
        remedy = "use the tokenizer of checkpoint.initial" if recipe.checkpoint.initial else "use 257 or more"
        yield f"model.vocab_size = {recipe.model.vocab_size} is smaller than the tokenizer's 257 tokens; {remedy}"
    if recipe.validation.interval == 0 or data.validation_path:
        return
    if data.source == "stream":
        yield (
            "validation.interval is set, but nothing is held out of a stream; set data.validation_path to shards or text, "
            "or validation.interval = 0"
        )
    elif data.source != "shards" and not data.holdout_every:  # shards may have a split
        yield (
            "validation.interval is set, but data.holdout_every = 0 holds out nothing; set validation.interval = 0, or "
            "data.holdout_every = 50"
        )


def _compiler(recipe: PretrainRecipe) -> Iterator[str]:
    if recipe.compile.mode == "none":
        if recipe.activation_checkpoint.mode == "memory_budget":
            yield (
                "activation_checkpoint.mode = 'memory_budget' is implemented by the compiler, but compile.mode = 'none'; "
                "set compile.mode = 'block', or use activation_checkpoint.mode = 'selective'"
            )
        return
    backend = recipe.compile.backend
    if backend in BACKENDS:
        return
    installed = sorted({entry.name for entry in entry_points(group="torch_dynamo_backends")})
    if backend not in installed:
        near = nearest(backend, [*BACKENDS, *installed])
        yield (
            f"compile.backend = '{shown(backend)}' is not a backend of torch.compile; "
            + (f"did you mean {near!r}? " if near else "")
            + f"choose from {', '.join([*BACKENDS, *installed])}, or install the package that registers it"
        )


def _checkpoint(recipe: PretrainRecipe) -> Iterator[str]:
    checkpoint, model = recipe.checkpoint, recipe.model
    if checkpoint.allow_changed:
        keys = [key.name for key in describe(type(recipe))]
        for key in checkpoint.allow_changed:
            if key not in keys:
                near = nearest(key, keys)
                hint = f"did you mean {near}?" if near else "see --help"
                yield f"checkpoint.allow_changed: {shown(key)} is not a key; {hint}"
    if checkpoint.export != "none" and not model.hf_architecture:
        yield f"checkpoint.export: transformers has no model that computes what model.name = {model.name!r} does"
    elif checkpoint.export != "none":
        try:
            model.to_hugging_face()
        except UserError as error:
            yield f"checkpoint.export: {error}"


def _float8(recipe: PretrainRecipe) -> Iterator[str]:
    float8, model = recipe.float8, recipe.model
    if float8.scaling == "none":
        return
    if float8.all_gather and recipe.parallelism.cpu_offload:
        yield (
            "float8.all_gather = true does not support parallelism.cpu_offload = true: it computes scales on the GPU; "
            "set one of them false"
        )
    if recipe.training.compute_dtype == "float16":
        yield (
            f"float8.scaling = '{float8.scaling}' does not support training.compute_dtype = 'float16': torch's float8 matmuls "
            "return bfloat16 or float32; set one of these, or float8.scaling = 'none'"
        )
    if float8.head and model.tied_head:
        yield "float8.head = true, but the head of this model is tied to the embedding, which is not converted; set it false"
    yield from selection_problems(float8, model, recipe.parallelism.tensor)


def _mps(recipe: PretrainRecipe, world_size: int) -> Iterator[str]:
    """What torch does not support on an Apple GPU."""
    attention, scaling, mode = recipe.training.attention, recipe.float8.scaling, recipe.compile.mode
    if world_size > 1:
        yield f"run.device = 'mps' trains one process, but there are {world_size}; use one, or run.device = 'cpu'"
    if scaling != "none":
        yield f"run.device = 'mps' has no float8; set float8.scaling = 'none' instead of {scaling!r}"
    if mode != "none":
        yield f"run.device = 'mps' is not supported by compile.mode = {mode!r}; set it to 'none'"
    if attention not in ("auto", "math"):
        yield f"run.device = 'mps' has no kernel training.attention = {attention!r}; set it to 'auto'"
