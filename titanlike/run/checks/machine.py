"""Checks of this machine before a run starts: hardware, memory, files and directories. Does not import torch."""

import glob
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.sections import DTYPE_BYTES, Evaluation
from titanlike.hardware.files import peak_flops
from titanlike.inference.tasks import read_task
from titanlike.interop.hf_folder import config_problems, is_hf_folder, read_config, tensor_files
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import all_configs
from titanlike.recipe import PretrainRecipe
from titanlike.utils.system import num_gpus, total_memory

BFLOAT16_MACOS = 14  # the first version of macOS with bfloat16 on its GPUs


def check_machine(recipe: PretrainRecipe, world_size: int = 1, local_world_size: int = 1) -> None:
    """Raises `UserError` if this machine lacks data, a writable run directory or hardware. Creates nothing."""
    problems = [
        *_errors("metrics.hardware = ", peak_flops, recipe.metrics.hardware),
        *_hardware(recipe),
        *_memory(recipe, world_size, local_world_size),
        *_data_files(recipe),
        *evaluation_files(recipe.evaluation),
        *_trackers(recipe),
        *_directories(recipe),
        *_initial_weights(recipe),
    ]
    if problems:
        raise UserError("\n".join(problems))


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


def _errors(prefix: str, function: Callable[..., object], *arguments: object) -> list[str]:
    """Returns the `UserError` that a call raises."""
    try:
        function(*arguments)
    except UserError as error:
        return [f"{prefix}{error}"]
    return []


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


def _initial_weights(recipe: PretrainRecipe) -> Iterator[str]:
    """Yields a sentence for weights to start from that do not exist, or are a Hugging Face folder of another model."""
    resumes = Path(recipe.run.dir, recipe.run.name, "environment.json").exists()
    for key, (path, model) in recipe.initial_weights.items():
        is_read = not resumes or key in recipe.frozen_weights
        if is_read and "://" not in path:
            yield from _weights(key, path, model, recipe.checkpoint.allow_changed)


def _weights(key: str, path: str, model: TransformerConfig, allow_changed: Sequence[str]) -> list[str]:
    if not Path(path).is_dir():
        return [f"{key} = {path!r} is not a folder; give a run, a checkpoint or a Hugging Face folder"]
    if not is_hf_folder(Path(path)):
        return []
    try:
        tensor_files(Path(path))
        found = read_config(Path(path), (*all_configs(), type(model)))
    except UserError as problem:
        return [f"{key}: {problem}"]
    return config_problems(path, found, model, allow_changed, key=key)
