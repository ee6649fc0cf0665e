"""The last lines of a complete run: its best validation loss, its weights and what to do with them."""

import json
import shlex
from pathlib import Path

import torch

from titanlike.distributed import process_group
from titanlike.metrics import Measured
from titanlike.run.hooks import call_hooks
from titanlike.run.run_dir import RunDirectory


def completion_message(run: RunDirectory, device: torch.device, measured: Measured) -> str | None:
    """Returns the message for a complete run, on rank 0."""
    if not process_group.is_main():
        return None
    lines = [_best_validation(run.metrics), *_next_commands(run)]
    lines += call_hooks("completed", recipe=run.recipe, metrics=run.metrics, device=device, measured=measured)
    return "\n".join([f"done: {run.path}", *filter(None, lines)])


def _best_validation(metrics: Path) -> str:
    if not metrics.exists():
        return f"{metrics} was deleted during training"
    records = [json.loads(line) for line in metrics.read_text().splitlines() if '"validation_loss"' in line]
    losses = [
        (record["validation_loss"], record["step"]) for record in records if record["validation_loss"] is not None
    ]
    if not losses:
        return ""
    best, step = min(losses)
    last = f"; {losses[-1][0]:.4f} at the last step" if losses[-1][0] > best else ""
    return f"best    validation loss {best:.4f} at step {step}{last}"


def _next_commands(run: RunDirectory) -> list[str]:
    """Returns the location of the weights, and the commands that use them."""
    if not run.recipe.checkpoint.enabled:
        return ["weights not saved: checkpoint.enabled = false"]
    path = shlex.quote(str(run.path))
    return [
        f"weights {run.checkpoints}" + (f", {run.exported}" if run.exported.exists() else ""),
        f"next    titanlike generate {path} --prompt TEXT",
        f"        titanlike export {path} FOLDER",
        f"        titanlike compare {path} OTHER_RUN",
    ]
