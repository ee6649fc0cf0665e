"""Recognizes a configuration of torchtitan, and refers to the page for its users."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from titanlike.config.base import UserError

# Those that no recipe has. A file with several of them is not a recipe with mistakes.
TABLES = (
    "job",
    "lr_scheduler",
    "comm",
    "quantize",
    "experimental",
    "fault_tolerance",
    "debug",
    "memory_estimation",
)
KEYS = (
    "model.flavor", "model.converters", "model.hf_assets_path", "model.tokenizer_path", "optimizer.name",
    "optimizer.implementation", "training.dataset", "training.dataset_path", "training.mixed_precision_param",
    "training.gc_freq", "training.compile", "training.batch_size", "training.data_parallel_shard_degree",
    "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree", "parallelism.context_parallel_degree",
    "checkpoint.enable", "checkpoint.enable_checkpoint", "checkpoint.folder", "checkpoint.async_mode", "compile.enable",
    "activation_checkpoint.selective_ac_option", "metrics.log_freq", "metrics.enable_tensorboard",
    "profiling.enable_profiling", "profiling.profile_freq", "validation.enable", "validation.freq",
)  # fmt: skip


def refuse_torchtitan(keys: Collection[str], values: Mapping[str, Any], path: Path) -> None:
    """Raises `UserError` for a file with several of torchtitan's tables and keys, of which each would be an unknown key.

    `keys` are the dotted keys of the recipe.
    """
    sections = {key.partition(".")[0] for key in keys}
    found = [f"[{table}]" for table in TABLES if table not in sections and isinstance(values.get(table), dict)]
    for key in KEYS:
        section, _, name = key.partition(".")
        table = values.get(section)
        if key not in keys and isinstance(table, dict) and name in table:
            found.append(key)
    if len(found) > 1:
        raise UserError(
            f"{path} has {', '.join(found[:3])}{' and more' if len(found) > 3 else ''} of torchtitan: docs/coming_from.md has the "
            "keys of a recipe for those of torchtitan"
        )
