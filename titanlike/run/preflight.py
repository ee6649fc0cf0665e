"""Checks of a recipe before anything starts: of what several sections say together, for any number of processes, and against this
machine. A section checks itself in its method `problems`. Does not import torch."""

import glob
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from titanlike.config import UserError, effect
from titanlike.config.base import LIMIT, divisors, nearest, one_of, shown
from titanlike.config.layout import BLOCK, SCHEDULES
from titanlike.config.optimizer import Optimizer
from titanlike.config.schema import describe
from titanlike.config.sections import DTYPE_BYTES, Evaluation, Parallelism
from titanlike.inference.tasks import read_task
from titanlike.recipe import PretrainRecipe
from titanlike.run.option_problems import (
    group_problems,
    initial_weights_problems,
    pipeline_problems,
    sharded_experts_problem,
)
from titanlike.utils.system import num_gpus, total_memory

# The backends of torch.compile that can train. The names are in torch, which is not imported here.
BACKENDS = ("inductor", "cudagraphs", "aot_eager", "aot_eager_decomp_partition", "eager")
FLEX_MIN_HEAD_DIM = 16  # of FlexAttention's kernels for GPUs
BFLOAT16_MACOS = 14  # the first version of macOS with bfloat16 on its GPUs


def check_recipe(recipe: PretrainRecipe, world_size: int) -> None:
    """Raises `UserError` with one line for each thing in the recipe that cannot work on this number of processes."""
    problems = [*recipe.problems(), *effect.problems(recipe), *_objective(recipe)]
    for field in fields(recipe):
        section = getattr(recipe, field.name)
        problems += section.problems() if hasattr(section, "problems") else []
    for check in (_lengths, _data, _attention, _compiler, _optimizer, _checkpoint, _tensor, _pipeline, _float8):
        problems += check(recipe)
    if recipe.run.device == "mps":
        problems += _mps(recipe, world_size)
    try:
        problems += _layout(recipe, recipe.parallelism.resolve(world_size))
    except UserError as problem:
        if not any("parallelism." in each for each in problems):  # of which it may be a consequence
            problems.append(str(problem))
    if problems:
        raise UserError("\n".join(problems))


def check_machine(recipe: PretrainRecipe, world_size: int = 1, local_world_size: int = 1) -> None:
    """Raises `UserError` if this machine lacks data, a writable run directory or hardware. Creates nothing."""
    problems = [
        *_hardware(recipe),
        *_memory(recipe, world_size, local_world_size),
        *_data_files(recipe),
        *evaluation_files(recipe.evaluation),
        *_trackers(recipe),
        *_directories(recipe),
    ]
    if recipe.initial_weights:
        problems += initial_weights_problems(recipe)
    if problems:
        raise UserError("\n".join(problems))


def _errors(prefix: str, function: Callable[..., object], *arguments: object) -> list[str]:
    """Returns the `UserError` that a call raises."""
    try:
        function(*arguments)
    except UserError as error:
        return [f"{prefix}{error}"]
    return []


# Checks for any machine.


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


def _attention(recipe: PretrainRecipe) -> Iterator[str]:
    """What the selected kernel does not support, which torch would report at the first step."""
    kernel, model, context = recipe.training.attention, recipe.model, recipe.parallelism.context
    reasons = {
        f"model.attention_soft_cap = {model.attention_soft_cap}": model.attention_soft_cap > 0,
        f"the attention sinks of model.name = {model.name!r}": model.has_sinks,
        recipe.data.masks_documents: recipe.data.masks_documents != "",
        f"model.sliding_window = {model.sliding_window}": model.window_hides(recipe.training.seq_len),
    }
    what = next((reason for reason, holds in reasons.items() if holds), "")
    masked = bool(what) and recipe.run.allows_cuda  # the CPU's flash kernel supports masks
    flex = masked and kernel == "auto"  # these use FlexAttention
    if flex and (recipe.run.device == "cuda" or num_gpus() > 0) and model.head_dim < FLEX_MIN_HEAD_DIM:
        yield (
            f"{what} uses FlexAttention on a GPU, which requires a head dimension of {FLEX_MIN_HEAD_DIM} or "
            f"more, but this model has {model.head_dim}; set training.attention = 'math', or use larger heads"
        )
    if flex and recipe.activation_checkpoint.mode == "selective" and recipe.compile.mode == "none":
        yield (
            f"{what} uses FlexAttention on a GPU, but activation_checkpoint.mode = 'selective' with "
            "compile.mode = 'none' keeps it from being compiled; set compile.mode = 'block', or "
            "activation_checkpoint.mode = 'full'"
        )
    heads, kv_heads = model.num_heads, model.num_kv_heads
    unsupported = (
        ("efficient", kv_heads != heads, f"does not support num_kv_heads = {kv_heads} and num_heads = {heads}"),
        ("cudnn", recipe.run.deterministic, "is not deterministic, but run.deterministic = true"),
        ("flash3 flash4", recipe.training.compute_dtype != "bfloat16", "requires training.compute_dtype = 'bfloat16'"),
        ("cudnn flash flash3 flash4", masked, f"does not support the mask of {what}"),
        ("flash", context == 1 and model.v_head_dim != model.head_dim, "requires heads of one dimension"),
        ("efficient", model.attention_soft_cap > 0, f"does not bound scores as {what} asks"),
        ("efficient", model.has_sinks, f"does not compute {what}"),
        (
            "cudnn efficient math flash3 flash4",
            context > 1 and not what,
            f"is not used with parallelism.context = {context}",
        ),
    )
    for kernels, holds, reason in unsupported:
        if kernel in kernels.split() and holds:
            yield f"training.attention = '{kernel}' {reason}; set training.attention = 'auto'"


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


def _adamw_section(recipe: PretrainRecipe) -> Optimizer:
    """Returns the section of AdamW, with its defaults if the program has another optimizer and a section of its own for it."""
    return recipe.optimizer if isinstance(recipe.optimizer, Optimizer) else Optimizer()


def _optimizer(recipe: PretrainRecipe) -> Iterator[str]:
    model, optimizer = recipe.model, _adamw_section(recipe)
    rows = [*model.matrices().values(), *model.expert_parameters().values()]
    if optimizer.state_dtype == "8bit" and all(shape[-1] % BLOCK for shape in rows):
        yield (
            f"optimizer.state_dtype = '8bit' quantizes rows of a multiple of {BLOCK} elements, and no matrix of this model has one "
            f"(model.dim = {model.dim}); use a multiple of {BLOCK}, or state_dtype = 'bfloat16' or 'full'"
        )
    moments = recipe.training.master_dtype if optimizer.state_dtype == "full" else optimizer.state_dtype
    if moments == "bfloat16" and optimizer.beta2 > 0.98:
        yield (
            f"optimizer.state_dtype = '{optimizer.state_dtype}' cannot represent a second moment, in bfloat16, with beta2 = "
            f"{optimizer.beta2}: the change of a step is below its precision; use beta2 = 0.98 or less, or state_dtype = '8bit'"
        )
    if optimizer.groups:
        yield from group_problems(recipe, optimizer)


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
        yield from _errors("checkpoint.export: ", model.to_hugging_face)


def _tensor(recipe: PretrainRecipe) -> Iterator[str]:
    """Sizes that the tensor- and context-parallel degrees do not divide, and options that they exclude."""
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
        if _adamw_section(recipe).state_dtype == "8bit" and inputs % BLOCK == 0 and inputs % (BLOCK * tensor):
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


def _pipeline(recipe: PretrainRecipe) -> Iterator[str]:
    if recipe.parallelism.pipeline > 1 and not any(recipe.parallelism.problems()):
        yield from pipeline_problems(recipe)


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
    from titanlike.float8.selection import selection_problems

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


# Checks for a number of processes.


def _layout(recipe: PretrainRecipe, layout: Parallelism) -> Iterator[str]:
    """What does not fit a number of processes. Raises `UserError` if they cannot share the batch."""
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
    if recipe.model.num_experts and any(group.optimizer == "muon" for group in _adamw_section(recipe).groups):
        yield from sharded_experts_problem(recipe, _adamw_section(recipe), layout)
    if num_ranks % layout.expert:
        near = [n for n in divisors(num_ranks) if n <= layout.expert][-4:]
        yield (
            f"parallelism.expert = {layout.expert} does not divide the {num_ranks} ranks of shard x context; use {one_of(near)}, "
            "or more ranks"
        )
    sequences_per_rank = training.global_batch_size // num_data_ranks
    yield from _microbatches(recipe, num_microbatches, sequences_per_rank)
    if recipe.float8.scaling != "none":
        from titanlike.float8.selection import token_problems

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


# Checks of this machine.


def _hardware(recipe: PretrainRecipe) -> Iterator[str]:
    training = recipe.training
    if recipe.run.device == "mps":
        version = platform.mac_ver()[0]
        if sys.platform != "darwin":
            yield f"run.device = 'mps' is an Apple GPU, but this system is {sys.platform}; set run.device = 'auto'"
        elif training.compute_dtype == "bfloat16" and int(version.partition(".")[0] or 0) < BFLOAT16_MACOS:
            yield (
                f"training.compute_dtype = 'bfloat16' requires macOS {BFLOAT16_MACOS} on an Apple GPU, but this is macOS "
                f"{version}; set it to 'float32'"
            )
    elif recipe.run.device == "cpu" or not num_gpus():
        if problem := recipe.float8.hardware_problem("the CPU", None):
            yield problem
        if training.attention in ("cudnn", "efficient", "flash3", "flash4"):
            yield (
                f"training.attention = '{training.attention}' is a kernel for GPUs, but this runs on the CPU; "
                "set training.attention = 'auto'"
            )


def _memory(recipe: PretrainRecipe, world_size: int, local_world_size: int) -> Iterator[str]:
    """Whether the weights and gradients that this machine holds on the CPU, the least that training needs, exceed its memory."""
    available = total_memory()
    if available is None or (num_gpus() and recipe.run.allows_cuda and not recipe.parallelism.cpu_offload):
        return
    parameters = recipe.model.num_parameters()
    # Weights that are frozen are in the compute dtype, and gradients are small then.
    training = recipe.training
    needed = parameters * (
        2 * DTYPE_BYTES[training.master_dtype] if recipe.trains_all_weights else DTYPE_BYTES[training.compute_dtype]
    )
    needed = needed * recipe.parallelism.replicate // world_size * local_world_size
    if needed > available:
        yield (
            f"the model has {parameters:,} parameters, and their weights and gradients take {needed / 2**30:,.0f} GiB of the "
            f"{available / 2**30:,.0f} GiB of memory of this machine; reduce model.vocab_size, model.dim or model.num_layers, or "
            "use more machines"
        )


def _exists(path: str, *, tokens: bool) -> bool:
    """Whether a path, a URL or a pattern names anything, with `tokens` also the prefix of a token file. URLs are not looked up."""
    names = [path, f"{path}.bin"] if tokens else [path]
    return "://" in path or any(Path(name).exists() or glob.glob(name, recursive=True) for name in names)


def _data_files(recipe: PretrainRecipe) -> list[str]:
    """The files of data and tokenizer that are missing, and shards that do not fit the recipe."""
    data, problems = recipe.data, list[str]()
    keys = dict.fromkeys(data.mixture, "mixture") if data.mixture else {data.path: "path"} if data.path else {}
    keys = keys if data.reads_paths else {}
    if data.validation_path:
        keys[data.validation_path] = "validation_path"
    shards = data.source == "shards"
    expected = (
        "a folder made by `titanlike data prepare`, or .bin files" if shards else "a text file, a folder or a pattern"
    )
    for path, key in keys.items():
        if not _exists(path, tokens=shards or key == "validation_path"):
            problems.append(
                f"data.{key} = {path!r} does not exist; give {expected}, or set data.source = 'synthetic' to run without data"
            )
    problems += data.missing_files()
    problems += _tokenizer_files(recipe.tokenizer.encoding)
    if shards and not problems:
        from titanlike.data.tokens.datasets import check_shards, has_tokens  # slow to import

        options = (recipe.tokenizer, recipe.model.vocab_size, recipe.checkpoint.initial)
        tokens = [path for path, key in keys.items() if key != "validation_path" or has_tokens(data, path)]
        problems = [problem for path in tokens for problem in _errors("", check_shards, path, *options)]
    return problems


def _tokenizer_files(encoding: str) -> Iterator[str]:
    if encoding == "bytes" or Path(encoding).is_file() or Path(encoding, "tokenizer.json").is_file():
        return
    if os.sep in encoding:
        yield (
            f"tokenizer.encoding = {encoding!r}: no such file; give a tiktoken rank file or tokenizer.json, the name of a "
            "tiktoken encoding such as 'gpt2', or 'bytes'"
        )
        return
    from titanlike.data.tokens.tokenizer import check_name  # slow to import, and most recipes do not need it

    yield from _errors("", check_name, encoding)


def evaluation_files(section: Evaluation) -> Iterator[str]:
    """Yields a sentence for each file of evaluation that is missing on this machine, or that is not a task."""
    for path in section.data:
        if not _exists(path, tokens=True):
            yield f"evaluation.data: {path!r} does not exist; give a text file, a folder, a pattern or token shards"
    for file in section.tasks:
        yield from _errors("evaluation.tasks: ", read_task, file)


def _trackers(recipe: PretrainRecipe) -> Iterator[str]:
    for name in ("wandb", "mlflow"):
        found = find_spec(name) if name in recipe.metrics.trackers else None
        if name in recipe.metrics.trackers and not (found and found.origin):  # a directory `wandb` is no package
            yield f'metrics.trackers names {name!r}, which is not installed; run: pip install "titanlike[{name}]"'
    directory = recipe.metrics.tensorboard_dir
    if "://" in directory:
        import fsspec  # type: ignore[import-untyped]  # slow to import, and unused by most runs

        try:
            fsspec.core.url_to_fs(directory)
        except (ImportError, ValueError) as error:
            yield f"metrics.tensorboard_dir = {directory!r}: {error}"


def _directories(recipe: PretrainRecipe) -> Iterator[str]:
    run, folder = recipe.run, Path(recipe.run.dir, recipe.run.name).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        yield f"run.dir = {run.dir!r}: {existing} is a file, not a folder; choose another run.dir or run.name"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"run.dir = {run.dir!r}: {existing} is not writable; choose another run.dir"
    elif run.name and (folder / "checkpoints").is_file():
        checkpoints = Path(run.dir, run.name, "checkpoints")
        yield f"{checkpoints} is a file, not a folder; remove it, or choose another run.name"
