"""titanlike: `recipes/pretrain.py`, data loading and logging included, with a recipe built from the task.

    row "shipped"   the recipe's defaults: compiled per block; not compiled on a CPU
    row "best"      compiled per block, also on a CPU
    rows "baseline", "compile", "float8", "float8_all_gather": the recipes of train_configs/study, one change each

`options` are recipe keys: `--option titanlike.best:training.loss_chunk=256`.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.protocol import Clock, Task
from titanlike.recipe import PretrainRecipe
from titanlike.run.start import start

# Each row's changes to the recipe's defaults.
FLOAT8 = {"float8.scaling": "tensorwise"}
ROWS = {
    "shipped": {},
    "best": {},
    "baseline": {"compile.mode": "none", "activation_checkpoint.mode": "selective"},
    "compile": {"activation_checkpoint.mode": "selective"},
    "float8": {"activation_checkpoint.mode": "selective", **FLOAT8},
    "float8_all_gather": {"activation_checkpoint.mode": "selective", **FLOAT8, "float8.all_gather": "true"},
}


def keys_of(task: Task, folder: str) -> dict[str, Any]:
    """Returns the task as keys of a recipe."""
    compiled = "none" if task.row == "shipped" and task.device == "cpu" else "block"
    keys: dict[str, Any] = {f"model.{key}": str(value).lower() for key, value in task.model.items()}
    keys |= {
        "run.dir": folder, "run.name": "run", "run.device": task.device, "run.seed": task.seed,
        "data.source": "synthetic", "data.holdout_every": 0, "validation.interval": 0,
        "training.steps": task.warmup + task.steps + 1, "training.seq_len": task.seq_len,
        "training.global_batch_size": task.batch_size, "training.local_batch_size": task.micro_batch_size,
        "training.compute_dtype": "float32" if task.precision == "float32" else "bfloat16",
        "training.max_norm": task.max_norm,
        "optimizer.lr": task.lr, "optimizer.beta1": task.beta1, "optimizer.beta2": task.beta2,
        "optimizer.eps": task.eps, "optimizer.weight_decay": task.weight_decay,
        "schedule.warmup_steps": 0, "schedule.decay": "none",
        "float8.scaling": "tensorwise" if task.precision == "float8" else "none",
        "compile.mode": compiled, "checkpoint.enabled": "false",
    }  # fmt: skip
    return keys | ROWS[task.row] | task.options


def recipe_of(task: Task, folder: str) -> PretrainRecipe:
    """Returns the task as a recipe."""
    toml = Path(folder, "task.toml")
    toml.write_text("")
    return start(PretrainRecipe, [str(toml), *(f"--{key}={value}" for key, value in keys_of(task, folder).items())])


def load(model: nn.Module, device: torch.device, task: Task) -> None:
    """Allocates the model, and loads the weights that all subjects start from."""
    model.to_empty(device=device)
    model.load_state_dict(task.weights)


def main() -> None:
    task = Task.read()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(task, folder)  # before torch is imported, like the recipe does
        train(task, recipe)


def train(task: Task, recipe: PretrainRecipe) -> None:
    """Runs the recipe with the task's tokens as data source."""
    from recipes import pretrain
    from titanlike.data.batches import sources
    from titanlike.data.tokens.arrays import InMemoryTokens
    from titanlike.run import run

    clock = Clock(task, ("titanlike", "torchao"))

    class Monitor(run.Monitor):
        def step(self, step: int, **values: Any) -> None:
            super().step(step, **values)
            clock.step(values["loss"])

    if Path(task.weights_file).exists():  # a GPU draws other numbers than the CPU that drew these
        pretrain.initialize = lambda model, device, *_, **__: load(model, device, task)  # type: ignore[assignment]
    sources.open_training = lambda *_: InMemoryTokens(np.load(task.tokens_file, mmap_mode="r"))  # type: ignore[assignment]
    run.Monitor = Monitor  # type: ignore[misc]
    pretrain.main(recipe)


if __name__ == "__main__":
    main()
