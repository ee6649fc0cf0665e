"""The folder of one run: its recipe, what it ran on, its numbers and its checkpoints. Here is decided whether it resumes."""

import dataclasses
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import titanlike
from titanlike.checkpoint import Saved
from titanlike.config import PretrainRecipe, UserError, to_toml
from titanlike.float8.selection import headlines as float8_headlines

# Sections that may differ from one start of a run to the next: they place, watch or keep the work, and do not change it.
# All others, those of a copied program among them, decide what the next steps compute.
FREE_SECTIONS = {
    "run",
    "parallelism",
    "compile",
    "activation_checkpoint",
    "checkpoint",
    "validation",
    "sample",
    "metrics",
}
# Single keys that may differ. Where the data lies does not matter: its fingerprint is compared.
FREE_KEYS = {
    "training.steps", "training.local_batch_size", "training.gc_interval", "training.loss_chunk",
    "training.attention", "optimizer.fused", "data.source", "data.path", "tokenizer.encoding", "float8.all_gather",
    "float8.emulate",
}  # fmt: skip
# Of these, what rounds otherwise or ends elsewhere: the run goes on, and is no longer the same to the bit.
INEXACT = (
    "training.steps", "training.local_batch_size", "training.loss_chunk", "training.attention", "optimizer.fused",
    "parallelism.cpu_offload",
    "parallelism.pipeline_", "parallelism.async_tensor", "float8.", "compile.mode", "compile.backend",
    "activation_checkpoint.",
)  # fmt: skip


class RunFolder:
    """Paths of a run. Nothing is written before `open`."""

    def __init__(self, recipe: PretrainRecipe) -> None:
        self.path = Path(recipe.run.dir, recipe.run.name)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"

    def open(self, recipe: PretrainRecipe, device: str, world_size: int, resumed_step: int) -> None:
        """Make the folder, write the recipe and the facts, and cut off what the metrics say of steps to be done again."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.dir = {recipe.run.dir!r}: {error}; choose another run.dir") from None
        comment = f"The whole recipe of this run. Run it again to resume:\n{self.command()}"
        (self.path / "recipe.toml").write_text(to_toml(recipe, comment))
        facts = environment_facts(device, world_size) | {"resumed_step": resumed_step}
        (self.path / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
        if self.metrics.exists():
            lines = [
                line for line in self.metrics.read_text(errors="replace").splitlines() if _step_of(line) <= resumed_step
            ]
            shortened = self.metrics.with_suffix(".partial")
            shortened.write_text("".join(f"{line}\n" for line in lines))
            shortened.replace(self.metrics)

    def command(self) -> str:
        """What takes this run up again."""
        return f"./run_train.sh {shlex.quote(str(self.path / 'recipe.toml'))}"

    def farewell(self) -> str:
        """What to say when the run is stopped by hand."""
        if not any(self.checkpoints.glob("step-*/state.json")):
            return "stopped before the first checkpoint"
        return f"stopped; to go on from the last checkpoint: {self.command()}"

    def beginning(self, saved: Saved | None, inexact: list[str]) -> str | None:
        """Where in the run this start begins, if that is not simply the beginning."""
        if saved:
            return f"resumed at step {saved.step}" + "".join(f"; not bit-exact: {reason}" for reason in inexact)
        if self.metrics.exists():
            return f"{self.path} has no checkpoint to resume from: beginning again at step 1"
        return None


def headlines(recipe: PretrainRecipe, layout: dict[str, int], device: str, num_tokens: int) -> list[str]:
    """What is about to be trained, in a few lines."""
    model, training = recipe.model, recipe.training
    ranks, data_ranks = math.prod(layout.values()), layout["replicate"] * layout["shard"]
    share, num_microbatches = training.global_batch_size // data_ranks, training.num_microbatches(data_ranks)
    stages = [str(number) for number in recipe.parallelism.split(model)]
    what = {
        "pipeline": f"{recipe.parallelism.pipeline_schedule}, stages of {' + '.join(stages)} blocks",
        "replicate": "copies of the model",
        "shard": "shares of weights, gradients and optimizer state",
        "context": f"shares of a sequence, {training.seq_len // layout['context']} tokens each",
        "tensor": f"shares of a matrix, {model.num_heads // layout['tensor']} heads each",
    }
    return [
        f"run     {Path(recipe.run.dir, recipe.run.name)}",
        f"model   {model.name} {model.size}: {model.num_parameters():,} parameters, "
        f"{model.flops_per_token(training.seq_len) / 1e6:,.0f} MFLOP a token",
        f"data    {recipe.data.source}: {num_tokens:,} tokens, {recipe.tokenizer.encoding} encoding",
        f"batch   {training.global_batch_size} sequences x {training.seq_len} tokens a step; each rank takes "
        f"{num_microbatches} x {share // num_microbatches}",
        f"ranks   {ranks} on {device}; compute {training.compute_dtype}, compile {recipe.compile.mode}",
        *(f"          {name:<9} {size:>4}  {what[name]}" for name, size in layout.items() if size > 1),
        *float8_headlines(
            recipe.float8,
            model.matrices(),
            model.tied_head,
            compiled=recipe.compile.mode != "none",
            sharded=layout["shard"] * layout["context"] > 1,
        ),
    ]


def check_resume(
    saved: Saved, recipe: PretrainRecipe, data: str, layout: dict[str, int], machine: dict[str, str]
) -> list[str]:
    """Refuse a checkpoint that this recipe would not continue. Returns what to tell the user if it is not bit-exact."""
    now = as_json(recipe)
    differences = _differences(_completed(saved.recipe, now, _defaults(recipe)), now)
    changed = [
        line
        for key, line in differences.items()
        if key == "run.seed" or (key.partition(".")[0] not in FREE_SECTIONS and key not in FREE_KEYS)
    ]
    where = f"{Path(recipe.run.dir, recipe.run.name)} holds a run at step {saved.step}"
    if changed:
        raise UserError(
            f"{where} that was trained otherwise: {'; '.join(changed)}. Put these back to resume, "
            "or give --run.name to start a new run"
        )
    if saved.data != data:
        raise UserError(
            f"{where} that read other data (fingerprint {saved.data}, now {data}). Bring the data back to resume, "
            "or give --run.name to start a new run"
        )
    if saved.step > recipe.training.steps:
        raise UserError(
            f"{where}, past training.steps = {recipe.training.steps}; set it to {saved.step} or more, "
            "or give --run.name to start a new run"
        )
    inexact = [line for key, line in differences.items() if key.startswith(INEXACT)]
    return inexact + list(
        _differences({"layout": saved.layout, **saved.machine}, {"layout": layout, **machine}).values()
    )


def _defaults(recipe: PretrainRecipe) -> dict[str, Any]:
    """What a recipe of this kind would be if it said nothing but which model."""
    usual = type(recipe)()
    same_model = isinstance(usual.model, type(recipe.model))
    return as_json(usual if same_model else dataclasses.replace(usual, model=type(recipe.model)()))


def _completed(old: dict[str, Any], new: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """An older recipe with the keys that there were not yet: they were what they are by default."""
    completed = dict(old)
    for key, default in defaults.items():
        if key not in old and key in new:
            completed[key] = default
        elif isinstance(default, dict) and isinstance(old[key], dict):
            completed[key] = _completed(old[key], new[key], default)
    return completed


def as_json(recipe: PretrainRecipe) -> dict[str, Any]:
    """A recipe as plain dictionaries. Its program goes by name: where the file lies is no part of what it means."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return values | {"recipe": Path(recipe.recipe).stem}


def machine_facts(device: torch.device) -> dict[str, str]:
    """What of the machine decides how results are rounded."""
    return {"device": device.type, "torch": torch.__version__.partition("+")[0]}


def environment_facts(device: str, world_size: int) -> dict[str, Any]:
    """What a later reader needs to know of where this ran."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "device": device,
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "titanlike": titanlike.__version__,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain")),
    }


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key in [*old, *(key for key in new if key not in old)]:
        name = f"{prefix}{key}"
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found |= _differences(before, after, f"{name}.")
        elif before != after:
            found[name] = f"{name} was {json.dumps(before)}, now {json.dumps(after)}"
    return found


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # the last line of a killed run may be cut short
        return float("inf")
