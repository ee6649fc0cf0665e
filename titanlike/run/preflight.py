"""Checks of a recipe before anything starts: for any number of processes, and against this machine. Does not import torch."""

import os
from importlib.metadata import entry_points
from pathlib import Path

from titanlike.config import PretrainRecipe, UserError
from titanlike.config.base import shown
from titanlike.config.layout import BLOCK
from titanlike.config.load import nearest
from titanlike.config.model_configs import CONFIGS
from titanlike.config.schema import describe
from titanlike.data.validation import data_problems, missing_data
from titanlike.float8.validation import float8_problems, hardware_problems, token_problems
from titanlike.inference.validation import evaluation_problems, missing_files
from titanlike.interop.hf_folder import config_problems, is_hf_folder, read_config, tensor_files
from titanlike.optim.validation import optimizer_group_problems
from titanlike.run.layout_validation import (
    adamw_section,
    batch_ramp_problems,
    expert_parallel_problems,
    microbatch_problems,
    pipeline_stage_problems,
    tensor_parallel_problems,
)
from titanlike.run.model_validation import attention_problems, lora_problems, model_problems
from titanlike.run.mps_validation import apple_gpu_problems, mps_problems
from titanlike.run.tracker_validation import missing_trackers, tracker_problems
from titanlike.utils.system import num_gpus, total_memory

# The backends of torch.compile that can train. The names are in torch, which is not imported here.
BACKENDS = ("inductor", "cudagraphs", "aot_eager", "aot_eager_decomp_partition", "eager")


def check_recipe(recipe: PretrainRecipe, world_size: int) -> None:
    """Raises `UserError` with one line for each thing in the recipe that cannot work on this number of processes."""
    problems = [
        *model_problems(recipe),
        *_schedule_problems(recipe),
        *_option_problems(recipe),
        *attention_problems(recipe),
        *_compile_problems(recipe),
        *data_problems(recipe),
        *evaluation_problems(recipe.evaluation),
        *tracker_problems(recipe.metrics),
        *tensor_parallel_problems(recipe),
        *pipeline_stage_problems(recipe),
        *float8_problems(recipe),
        *lora_problems(recipe),
        *mps_problems(recipe, world_size),
    ]
    try:
        layout = recipe.parallelism.resolve(world_size)
        num_data_ranks = layout.replicate * layout.shard
        num_microbatches = recipe.training.num_microbatches(num_data_ranks)
        sequences_per_rank = recipe.training.global_batch_size // num_data_ranks
        problems += expert_parallel_problems(recipe, layout.shard * layout.context)
        problems += microbatch_problems(recipe, num_microbatches, sequences_per_rank)
        problems += token_problems(recipe, sequences_per_rank // num_microbatches)
        problems += batch_ramp_problems(recipe, num_data_ranks)
    except UserError as problem:
        problems.append(str(problem))
    if problems:
        raise UserError("\n".join(problems))


def check_machine(recipe: PretrainRecipe, world_size: int = 1, local_world_size: int = 1) -> None:
    """Raises `UserError` if this machine lacks data, a writable run directory or hardware. Creates nothing."""
    problems = []
    if recipe.run.device == "mps":
        problems += apple_gpu_problems(recipe)
    elif recipe.run.device == "cpu" or not num_gpus():
        problems += hardware_problems(recipe.float8, "the CPU", None)
        if recipe.training.attention in ("cudnn", "efficient", "flash3", "flash4"):
            problems.append(
                f"training.attention = '{recipe.training.attention}' is a kernel for GPUs, but this runs on the CPU; "
                "set training.attention = 'auto'"
            )
    problems += _memory_problems(recipe, world_size, local_world_size)
    problems += missing_data(recipe)
    problems += missing_files(recipe.evaluation)
    problems += missing_trackers(recipe.metrics)
    problems += _initial_problems(recipe)
    folder = Path(recipe.run.dir, recipe.run.name)
    folder_problem = _folder_problem("run.dir", recipe.run.dir, folder, " or run.name")
    problems += folder_problem
    if not folder_problem and recipe.run.name and (folder / "checkpoints").is_file():
        problems.append(f"{folder / 'checkpoints'} is a file, not a folder; remove it, or choose another run.name")
    if recipe.compile.mode != "none" and recipe.compile.cache:
        problems += _folder_problem("compile.cache", recipe.compile.cache, Path(recipe.compile.cache))
    if problems:
        raise UserError("\n".join(problems))


def _folder_problem(key: str, value: str, folder: Path, or_key: str = "") -> list[str]:
    """Whether a directory exists or can be created."""
    folder = folder.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        return [f"{key} = {value!r}: {existing} is a file, not a folder; choose another {key}{or_key}"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{key} = {value!r}: {existing} is not writable; choose another {key}"]
    return []


def _initial_problems(recipe: PretrainRecipe) -> list[str]:
    """Whether the weights to start from exist, and, if they are a Hugging Face folder, are those of the recipe's model."""
    initial = recipe.checkpoint.initial
    if not initial or "://" in initial:
        return []
    if not Path(initial).is_dir():
        return [f"checkpoint.initial = {initial!r} is not a folder; give a run, a checkpoint or a Hugging Face folder"]
    if not is_hf_folder(Path(initial)):
        return []
    try:
        tensor_files(Path(initial))
        found = read_config(Path(initial), (*CONFIGS, type(recipe.model)))
    except UserError as problem:
        return [f"checkpoint.initial: {problem}"]
    return config_problems(initial, found, recipe.model, recipe.checkpoint.allow_changed)


def _memory_problems(recipe: PretrainRecipe, world_size: int, local_world_size: int) -> list[str]:
    """Whether the weights and gradients that this machine holds on the CPU, the least that training needs, exceed its memory."""
    available = total_memory()
    if available is None or (num_gpus() and recipe.run.allows_cuda and not recipe.parallelism.cpu_offload):
        return []
    parameters, element_size = recipe.model.num_parameters(), 4 if recipe.training.master_dtype == "float32" else 2
    # With LoRA, gradients are small.
    needed = (
        (1 if recipe.lora.rank else 2)
        * element_size
        * parameters
        * recipe.parallelism.replicate
        // world_size
        * local_world_size
    )
    if needed <= available:
        return []
    return [
        f"the model has {parameters:,} parameters, and their weights and gradients take {needed / 2**30:,.0f} GiB of the "
        f"{available / 2**30:,.0f} GiB of memory of this machine; reduce model.vocab_size, model.dim or model.num_layers, or use "
        "more machines"
    ]


def _compile_problems(recipe: PretrainRecipe) -> list[str]:
    """Whether torch.compile has the backend: one of its own, or one that an installed package registers."""
    backend = recipe.compile.backend
    if recipe.compile.mode == "none" or backend in BACKENDS:
        return []
    installed = {entry.name for entry in entry_points(group="torch_dynamo_backends")}
    if backend in installed:
        return []
    near = nearest(backend, [*BACKENDS, *installed])
    hint = f"did you mean {near!r}? " if near else ""
    return [
        f"compile.backend = '{shown(backend)}' is not a backend of torch.compile; {hint}choose from "
        f"{', '.join([*BACKENDS, *sorted(installed)])}, or install the package that registers it"
    ]


def _schedule_problems(recipe: PretrainRecipe) -> list[str]:
    steps, schedule = recipe.training.steps, recipe.schedule
    if schedule.warmup_steps > steps:
        return [
            f"schedule.warmup_steps = {schedule.warmup_steps} is more than training.steps = {steps}, so the learning rate would "
            f"not reach its peak; use schedule.warmup_steps = {steps} or less, or train longer"
        ]
    if schedule.decay_ratio and schedule.warmup_steps + schedule.num_decay_steps(steps) > steps:
        return [
            f"schedule.warmup_steps = {schedule.warmup_steps} and schedule.decay_ratio = {schedule.decay_ratio}, which is "
            f"{schedule.num_decay_steps(steps)} steps, are more than training.steps = {steps}; shorten them or train longer"
        ]
    return []


def _option_problems(recipe: PretrainRecipe) -> list[str]:
    """Options that contradict one another."""
    training, optimizer, checkpoint = recipe.training, adamw_section(recipe), recipe.checkpoint
    problems = []
    if optimizer.state_dtype == "bfloat16" and optimizer.beta2 > 0.98:
        problems.append(
            f"optimizer.state_dtype = 'bfloat16' cannot represent a second moment with beta2 = {optimizer.beta2}: the change of "
            "a step is below its precision; use beta2 = 0.98 or less, or state_dtype = '8bit'"
        )
    rows = [*recipe.model.matrices().values(), *recipe.model.expert_parameters().values()]
    if optimizer.state_dtype == "8bit" and all(shape[-1] % BLOCK for shape in rows):
        problems.append(
            f"optimizer.state_dtype = '8bit' quantizes rows of a multiple of {BLOCK} elements, and no matrix of this model has one "
            f"(model.dim = {recipe.model.dim}); use a multiple of {BLOCK}, or state_dtype = 'bfloat16' or 'full'"
        )
    if optimizer.stochastic_rounding and training.master_dtype != "bfloat16":
        problems.append(
            "optimizer.stochastic_rounding = true has no effect on training.master_dtype = 'float32'; set "
            "training.master_dtype = 'bfloat16', or stochastic_rounding = false"
        )
    problems += optimizer_group_problems(recipe, optimizer)
    if recipe.activation_checkpoint.mode == "memory_budget" and recipe.compile.mode == "none":
        problems.append(
            "activation_checkpoint.mode = 'memory_budget' is implemented by the compiler, but compile.mode = 'none'; "
            "set compile.mode = 'block', or use activation_checkpoint.mode = 'selective'"
        )
    keys = [key.name for key in describe(type(recipe))] if checkpoint.allow_changed else []
    for key in checkpoint.allow_changed:
        if key not in keys:
            near = nearest(key, keys)
            hint = f"did you mean {near}?" if near else "see --help"
            problems.append(f"checkpoint.allow_changed: {shown(key)} is not a key; {hint}")
    if checkpoint.export != "none" and not checkpoint.enabled:
        problems.append("checkpoint.export exports the last checkpoint, but checkpoint.enabled = false")
    if checkpoint.export != "none" and not recipe.model.hf_architecture:
        problems.append(
            f"checkpoint.export: transformers has no model that computes what model.name = {recipe.model.name!r} does"
        )
    elif checkpoint.export != "none":
        try:
            recipe.model.to_hugging_face()
        except UserError as error:
            problems.append(f"checkpoint.export: {error}")
    scheme = checkpoint.dir.partition("://")[0] if "://" in checkpoint.dir else ""
    if scheme in ("memory", "http", "https", "data"):
        lost = "is lost when the process ends" if scheme == "memory" else "cannot be written"
        problems.append(
            f"checkpoint.dir = {checkpoint.dir!r} {lost}; use a directory, or a store such as s3://bucket/runs"
        )
    if checkpoint.export != "none" and "://" in checkpoint.dir:
        problems.append(
            f"checkpoint.export requires a local checkpoint.dir, but it is the URL {checkpoint.dir!r}; set checkpoint.export = "
            "'none', and use `titanlike export` on a copy"
        )
    if "://" in checkpoint.initial:
        problems.append(f"checkpoint.initial = {checkpoint.initial!r} is a URL; download the folder, and give its path")
    if recipe.parallelism.cpu_offload and not recipe.run.allows_cuda:
        problems.append(
            f"parallelism.cpu_offload = true moves weights from a GPU to the host, but run.device = '{recipe.run.device}'; set it "
            "to false"
        )
    return problems
