"""Trains torchtitan's models and those of converted recipes from the same weights, on the same tokens, and records both.

    python -m benchmarks.torchtitan_steps --out benchmarks/results/torchtitan_steps.json

Requires torchtitan 0.2.2. Its model, loss, optimizer, schedule and clipping take the values of a job config, and ours those of the
recipe that `titanlike import` makes of it. On a CPU, in float32, without compilation.
"""

import argparse
import copy
import importlib
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.optim.optimizer import build_optimizer
from titanlike.optim.schedule import learning_rate, set_learning_rate
from titanlike.recipe import PretrainRecipe, load
from titanlike.tools.migration import torchtitan

STEPS, BATCH, SEQ_LEN = 10, 4, 256
OPTIMIZER = {"lr": 2e-3, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.2}  # no value is a default
SCHEDULE = {"warmup_steps": 3, "decay_ratio": 0.0}
MAX_NORM = 0.5
MODELS = {"llama3": ("llama3_args", "Transformer", "Llama3"), "qwen3": ("qwen3_args", "Qwen3Model", "Qwen3")}


def recipe_of(name: str) -> PretrainRecipe:
    """Returns the recipe of a job config for the debug model."""
    values = {
        "model": {"name": name, "flavor": "debugmodel"},
        "training": {"steps": STEPS, "seq_len": SEQ_LEN, "global_batch_size": BATCH, "max_norm": MAX_NORM},
        "optimizer": OPTIMIZER,
        "lr_scheduler": SCHEDULE,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.toml")
        path.write_text(torchtitan.convert("job.toml", values, 1).text())
        return load(PretrainRecipe, path)


def their_model(name: str, ours: nn.Module, recipe: PretrainRecipe) -> nn.Module:
    """Returns torchtitan's model with the weights of ours, by way of Hugging Face's names."""
    flavors, model_class, adapter = MODELS[name]
    module = importlib.import_module(f"torchtitan.models.{name}")
    job = importlib.import_module("torchtitan.config.job_config").JobConfig()
    job.training.seq_len = SEQ_LEN
    args = copy.deepcopy(getattr(module, flavors)["debugmodel"])
    args.update_from_config(job)
    model: nn.Module = getattr(module, model_class)(args)
    with torch.no_grad():
        model.init_weights()  # type: ignore[operator]
    parameters = dict(ours.named_parameters())
    tensors = {spec.hf_name: parameters[key].detach().clone() for key, spec in recipe.model.parameters().items()}
    adapters = importlib.import_module(f"torchtitan.models.{name}.model.state_dict_adapter")
    model.load_state_dict(getattr(adapters, f"{adapter}StateDictAdapter")(args, None).from_hf(tensors))
    return model


def train(name: str) -> list[dict[str, float]]:
    """Returns the loss, gradient norm and learning rate of each step, of both."""
    recipe = recipe_of(name)
    with torch.device("meta"):
        ours = build_model(recipe.model)
    initialize(ours, torch.device("cpu"), 0)
    theirs = their_model(name, ours, recipe)
    options = {"lr": OPTIMIZER["lr"], "eps": OPTIMIZER["eps"], "weight_decay": OPTIMIZER["weight_decay"]}
    their_optimizer = torch.optim.AdamW(list(theirs.parameters()), betas=(0.9, OPTIMIZER["beta2"]), **options)
    config = importlib.import_module("torchtitan.config.job_config").LRScheduler(**SCHEDULE)
    schedulers = importlib.import_module("torchtitan.components.lr_scheduler")
    scheduler = schedulers.build_lr_schedulers(_Optimizers([their_optimizer]), config, STEPS)
    loss_function = importlib.import_module("torchtitan.components.loss").cross_entropy_loss
    clip = importlib.import_module("torchtitan.distributed.utils").clip_grad_norm_
    optimizer = build_optimizer(ours, recipe.optimizer)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, recipe.model.vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        their_loss = loss_function(theirs(inputs), labels) / labels.numel()
        their_optimizer.zero_grad()
        their_loss.backward()
        their_norm = clip(theirs.parameters(), MAX_NORM)
        rate = learning_rate(step, STEPS, recipe.optimizer.lr, recipe.schedule)
        row = {"step": step, "their_loss": their_loss.item(), "their_norm": float(their_norm)}
        row |= {"their_learning_rate": their_optimizer.param_groups[0]["lr"], "learning_rate": rate}
        their_optimizer.step()
        if step < STEPS:
            scheduler.step()
        loss = nn.functional.cross_entropy(ours(inputs).flatten(0, 1).float(), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(ours.parameters(), recipe.training.max_norm)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        rows.append(row | {"loss": loss.item(), "norm": float(norm)})
    return rows


class _Optimizers(list[torch.optim.Optimizer]):
    """What torchtitan's schedulers iterate over."""


def table(result: dict[str, Any]) -> str:
    """Returns the losses and gradient norms as a table in Markdown."""
    lines = [
        "| Step | " + " | ".join(f"{name}: torchtitan | recipe" for name in result["models"]) + " |",
        "|---|" + "---|---|" * len(result["models"]),
    ]
    for rows in zip(*result["models"].values(), strict=True):
        cells = [f"{row['their_loss']:.5f} | {row['loss']:.5f}" for row in rows]
        lines.append(f"| {rows[0]['step']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    versions = {name: version(name) for name in ("torch", "torchtitan")}
    result = {"versions": versions, "models": {name: train(name) for name in MODELS}}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result), end="")


if __name__ == "__main__":
    main()
