"""Shrunk shipped recipes, and what runs before each of their steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli

from titanlike.data.batches.loader import BatchLoader
from titanlike.recipe import PretrainRecipe, load, to_toml
from titanlike.tools.programs import toml
from titanlike.tools.verify.small_recipe import shrink

FOLDER = Path(__file__).parents[1] / "train_configs"
MICROBATCHES = 2  # per step, under any layout
WARM = 3  # the first step after warm-up
STEPS = 4

# The recipes below cover each kind; others differ only in sizes.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "FSDP": (2, dict(shard=2)),
    "TP": (2, dict(tensor=2)),
    "CP": (2, dict(context=2)),
    "PP": (2, dict(pipeline=2)),
    "HSDP": (4, dict(replicate=2, shard=2)),
    "TP-FSDP": (4, dict(tensor=2, shard=2)),
    "CP-TP": (4, dict(context=2, tensor=2)),
    "PP-TP": (4, dict(pipeline=2, tensor=2)),
}


def small(folder: Path, name: str, layout: str, **changes: Any) -> PretrainRecipe:
    """Returns a shipped recipe, shrunk like `titanlike verify` does, with all settings that affect speed restored."""
    processes, dimensions = LAYOUTS[layout]
    keys = {f"parallelism.{key}": str(value) for key, value in dimensions.items()}
    recipe = load(PretrainRecipe, FOLDER / f"{name}.toml", keys)
    smaller = shrink(tomli.loads(to_toml(recipe)), processes, STEPS)
    smaller |= {
        "training.compute_dtype": recipe.training.compute_dtype,
        "training.global_batch_size": MICROBATCHES * processes,
        "training.local_batch_size": processes // (dimensions.get("replicate", 1) * dimensions.get("shard", 1)),
        "compile.mode": recipe.compile.mode,
        # Traces and partitions like inductor, without code generation.
        "compile.backend": "aot_eager_decomp_partition",
        "activation_checkpoint.mode": recipe.activation_checkpoint.mode,
        "float8.scaling": recipe.float8.scaling,
        "float8.all_gather": recipe.float8.all_gather,
        "float8.emulate": recipe.float8.scaling != "none",
        "float8.layers": ["*"],
        "optimizer.state_dtype": recipe.optimizer.state_dtype,
        "validation.interval": 0,
        "checkpoint.enabled": False,
        "metrics.interval": STEPS,
        "run.dir": str(folder),
        "run.name": "run",
    } | changes
    return load(PretrainRecipe, FOLDER / f"{name}.toml", keys | {key: toml(value) for key, value in smaller.items()})


@contextmanager
def before_each_step(before: Callable[[int], None]) -> Iterator[None]:
    """Calls `before(step)` before each step reads its data."""
    original = BatchLoader.microbatches

    def patched(self: Any, step: int) -> Any:
        before(step)
        return original(self, step)

    BatchLoader.microbatches = patched  # type: ignore[method-assign]
    try:
        yield
    finally:
        BatchLoader.microbatches = original  # type: ignore[method-assign]
