"""Whether a run is taken up again: what of a recipe may change between two starts, and what is then no longer exact."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.config import PretrainRecipe, UserError
from titanlike.run.run_dir import RunDirectory, recipe_as_json

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
    "training.non_finite", "training.skip_limit", "training.skip_window",
    "training.attention", "optimizer.fused", "tokenizer.encoding", "data.source", "data.path",
    "data.mixture", "data.validation_path", "data.cache", "data.prefetch", "data.workers", "data.bad_records", "float8.all_gather",
    "float8.emulate",
}  # fmt: skip
# Of these, what rounds otherwise or ends elsewhere: the run goes on, and is no longer the same to the bit.
INEXACT = (
    "training.steps", "training.local_batch_size", "training.loss_chunk", "training.attention", "optimizer.fused",
    "parallelism.cpu_offload",
    "parallelism.pipeline_", "parallelism.async_tensor_parallel", "float8.", "compile.mode", "compile.backend",
    "activation_checkpoint.",
)  # fmt: skip


def check_resume(saved: CheckpointMetadata, now: CheckpointMetadata, recipe: PretrainRecipe) -> list[str]:
    """Refuse a checkpoint that this recipe would not continue, `now` being what a checkpoint of it would say. Returns what to
    tell the user if it is not bit-exact."""
    differences = _differences(_completed(saved.recipe, now.recipe, _defaults(recipe)), now.recipe)
    changed = {
        key: line
        for key, line in differences.items()
        if key == "run.seed" or (key.partition(".")[0] not in FREE_SECTIONS and key not in FREE_KEYS)
    }
    refused = {key: line for key, line in changed.items() if key not in recipe.checkpoint.allow_changed}
    where = f"{Path(recipe.run.dir, recipe.run.name)} holds a run at step {saved.step}"
    fresh = "to resume, or give --run.name to start a new run"
    if refused:
        raise UserError(
            f"{where} that was trained otherwise: {'; '.join(refused.values())}. Put these back {fresh}; to go on all the "
            f"same: --checkpoint.allow_changed='{json.dumps(list(refused))}'"
        )
    if saved.tokenizer not in ("", now.tokenizer):
        raise UserError(
            f"{where} that had another tokenizer (fingerprint {saved.tokenizer}, now {now.tokenizer}). Bring it back {fresh}"
        )
    if saved.data != now.data:
        raise UserError(
            f"{where} that read other data (fingerprint {saved.data}, now {now.data}). Bring the data back {fresh}"
        )
    if saved.step > recipe.training.steps:
        raise UserError(
            f"{where}, past training.steps = {recipe.training.steps}; set it to {saved.step} or more, "
            "or give --run.name to start a new run"
        )
    inexact = [line for key, line in differences.items() if key in changed or key.startswith(INEXACT)]
    before, after = ({"layout": one.layout, **one.machine} for one in (saved, now))
    return inexact + list(_differences(before, after).values())


def _defaults(recipe: PretrainRecipe) -> dict[str, Any]:
    """What a recipe of this kind would be if it said nothing but which model."""
    usual = type(recipe)()
    same_model = isinstance(usual.model, type(recipe.model))
    return recipe_as_json(usual if same_model else dataclasses.replace(usual, model=type(recipe.model)()))


def _completed(old: dict[str, Any], new: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """An older recipe with the keys that there were not yet: they were what they are by default."""
    completed = dict(old)
    for key, default in defaults.items():
        if key not in old and key in new:
            completed[key] = default
        elif isinstance(default, dict) and isinstance(old[key], dict):
            completed[key] = _completed(old[key], new[key], default)
    return completed


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


@dataclass(frozen=True)
class ResumePlan:
    """Where a run starts, decided before anything is built or written."""

    checkpoint: CheckpointMetadata | None  # None: a new run
    message: str | None  # what to print about it

    @property
    def first_step(self) -> int:
        """The first step to train, counted from 1."""
        return self.checkpoint.step + 1 if self.checkpoint else 1

    @property
    def skipped(self) -> Sequence[int]:
        """Steps whose update earlier starts of the run skipped."""
        return self.checkpoint.skipped if self.checkpoint else ()


def plan_resume(
    run: RunDirectory, checkpoints: CheckpointManager, metadata: CheckpointMetadata, recipe: PretrainRecipe
) -> ResumePlan:
    """Finds the checkpoint to resume from, and refuses it if this recipe would not continue its run."""
    checkpoint = checkpoints.find(recipe.checkpoint.resume_from)
    inexact = check_resume(checkpoint, metadata, recipe) if checkpoint else []
    return ResumePlan(checkpoint, run.resume_message(checkpoint, inexact))
