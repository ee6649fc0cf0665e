"""Which changes of a recipe a resume refuses, and which make the resumed run inexact."""

import dataclasses
import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlike.checkpoint import CheckpointMetadata
from titanlike.config import UserError
from titanlike.config.base import validate
from titanlike.config.effect import disabled_keys
from titanlike.config.layout import BatchSizes
from titanlike.config.optimizer import Schedule
from titanlike.optim.schedule import learning_rate
from titanlike.recipe import PretrainRecipe
from titanlike.run.run_dir import recipe_as_json

# Sections that may change: they affect placement, logging and storage, and not what is computed. All other sections, including
# those that a copied program defines, determine the next steps.
FREE_SECTIONS = {
    "run",
    "parallelism",
    "compile",
    "activation_checkpoint",
    "checkpoint",
    "validation",
    "evaluation",
    "sample",
    "metrics",
    "profiling",
}
FIXED_KEYS = ("run.seed", "checkpoint.initial")  # keys of these sections that may not
# Keys of other sections that may change. The location of the data is irrelevant: its fingerprint is compared.
FREE_KEYS = {
    "training.local_batch_size", "training.loss_chunk", "training.non_finite", "training.skip_limit",
    "training.attention", "tokenizer.encoding", "data.source", "data.path",
    "data.mixture", "data.cache", "data.prefetch", "data.workers", "data.bad_records",
    "data.chat_template", "data.fields", "float8.all_gather",
    "float8.emulate",
}  # fmt: skip
# Keys that decide what a checkpoint contains, as the model's keys do.
TENSOR_KEYS = {"lora.rank", "lora.layers", "optimizer.state_dtype"}
# Keys that may change if the batches of the steps taken do not.
BATCH_SIZE_KEYS = {"training.batch_ramp", "training.global_batch_size"}
# Free keys that change rounding: the resumed run is not bit-exact.
INEXACT = (
    "training.local_batch_size", "training.loss_chunk", "training.attention", "parallelism.cpu_offload",
    "parallelism.pipeline_", "parallelism.async_tensor_parallel", "parallelism.expert", "parallelism.gradient_sync",
    "float8.", "compile.mode", "compile.backend", "activation_checkpoint.",
)  # fmt: skip


def check_resume(saved: CheckpointMetadata, now: CheckpointMetadata, recipe: PretrainRecipe) -> list[str]:
    """Raises `UserError` if a checkpoint does not fit a recipe, where `now` describes a checkpoint that this recipe would write.

    Returns the reasons why the resumed run is not bit-exact.
    """
    # The key of the program was `recipe` in earlier versions.
    before = {"program" if key == "recipe" else key: value for key, value in saved.recipe.items()}
    before = _with_new_keys(before, now.recipe, _default_recipe(recipe))
    differences = changed_keys(before, now.recipe)
    for key in differences.keys() & _keys_without_effect(before, recipe):
        del differences[key]
    for key, after in now.weights.items():
        if saved.weights.get(key) == after:
            differences.pop(key, None)  # the folder has moved
        elif key in saved.weights:
            path = json.dumps(recipe.initial_weights[key][0])
            differences.setdefault(
                key,
                f"{key} = {path} had the weights {saved.weights[key]}, now {after} (of a run that went on, name the checkpoint)",
            )
    if not saved.step:  # weights alone
        differences = {key: line for key, line in differences.items() if key.startswith("model.")}
    run = f"{Path(recipe.run.dir, recipe.run.name)} holds a run at step {saved.step}"
    or_new_run = "or give --run.name to start a new run"
    if saved.step > recipe.training.steps:
        raise UserError(
            f"{run}, past training.steps = {recipe.training.steps}; set it to {saved.step} or more, {or_new_run}"
        )
    # The schedule may change if every step taken so far has the same learning rate under both: as in the stable phase.
    scheduled = {key for key in differences if key == "training.steps" or key.startswith("schedule.")}
    problem = _learning_rate_problem(before, recipe, saved.step) if scheduled else ""
    if not problem:
        differences = {key: line for key, line in differences.items() if key not in scheduled}
    if _same_batches(before, recipe, saved.step):
        differences = {key: line for key, line in differences.items() if key not in BATCH_SIZE_KEYS}
    if _same_held_out(before, recipe):
        differences.pop("data.validation_path", None)
    changed = {
        key: line
        for key, line in differences.items()
        if key in FIXED_KEYS or (key.partition(".")[0] not in FREE_SECTIONS and key not in FREE_KEYS)
    }
    refused = {key: line for key, line in changed.items() if key not in recipe.checkpoint.allow_changed}
    if refused and refused.keys() <= scheduled:
        raise UserError(
            f"{run}, but {problem} ({'; '.join(refused.values())}); restore these values, resume from an earlier step with "
            f"--checkpoint.resume_from, {or_new_run}{_allowing(refused)}"
        )
    if refused:
        raise UserError(
            f"{run} that was trained with another recipe: {'; '.join(refused.values())}. Restore these values to resume, "
            f"{or_new_run}{_allowing(refused) if _same_tensors(before, recipe, refused) else ''}"
        )
    if saved.tokenizer not in ("", now.tokenizer):
        raise UserError(
            f"{run} that was trained with another tokenizer (fingerprint {saved.tokenizer}, now {now.tokenizer}). Restore it to "
            f"resume, {or_new_run}"
        )
    if saved.data != now.data and not saved.imported:
        raise UserError(
            f"{run} that was trained on other data (fingerprint {saved.data}, now {now.data}). Restore the data to resume, "
            f"{or_new_run}"
        )
    inexact = [line for key, line in differences.items() if key in changed or key.startswith(INEXACT)]
    if saved.imported:
        return [*inexact, f"imported from {saved.imported}"]
    if saved.program not in ("", now.program):
        inexact.append(f"the program {Path(recipe.program).stem}.py has changed")
    machine_before, machine_now = ({"layout": one.layout, **one.machine} for one in (saved, now))
    inexact += changed_keys(machine_before, machine_now).values()
    if now.machine.get("device") in ("cuda", "mps") and not recipe.run.deterministic:
        inexact.append("run.deterministic = false, and kernels of a GPU are not deterministic")
    return inexact


def _keys_without_effect(before: dict[str, Any], recipe: PretrainRecipe) -> set[str]:
    """Returns the keys that have no effect in one of two recipes. What disables them there is compared itself."""
    recipes = [recipe]
    with suppress(ValueError):  # a recipe of another version or architecture
        recipes.append(validate(type(recipe), before))
    return {each.key for one in recipes for each in disabled_keys(one)}


def _allowing(refused: Collection[str]) -> str:
    """Returns the advice to allow refused changes."""
    return f"; to resume with the changes: --checkpoint.allow_changed='{json.dumps(list(refused))}'"


def _same_tensors(before: dict[str, Any], recipe: PretrainRecipe, changed: Collection[str]) -> bool:
    """Whether a checkpoint has the tensors that the recipe needs, after changes of these keys."""
    if TENSOR_KEYS & set(changed):
        return False
    try:
        model = validate(type(recipe.model), before["model"])
    except ValueError:  # another architecture
        return False
    shapes, needed = ({name: spec.shape for name, spec in one.parameters().items()} for one in (model, recipe.model))
    return shapes == needed


def _learning_rate_problem(before: dict[str, Any], recipe: PretrainRecipe, num_taken: int) -> str:
    """Names the first of the steps taken that has another learning rate under this recipe. Returns "" if there is none."""
    try:
        schedule, steps = validate(Schedule, before.get("schedule")), before["training"]["steps"]
    except ValueError:
        schedule = None
    if schedule is None or type(recipe.schedule) is not Schedule:
        return (
            "the learning rates of the steps taken cannot be compared, because the program has its own schedule section"
        )
    for step in range(1, num_taken + 1):  # relative to the peak: `optimizer.lr` is compared by itself
        old = learning_rate(step, steps, 1.0, schedule)
        new = learning_rate(step, recipe.training.steps, 1.0, recipe.schedule)
        if old != new:
            return f"the learning rate of step {step} was {old:.4g} of the peak and would be {new:.4g}"
    return ""


def _same_batches(before: dict[str, Any], recipe: PretrainRecipe, num_taken: int) -> bool:
    """Whether the steps taken have the same batches under both batch-size ramps."""
    training = before["training"]
    ramp = tuple((num_steps, size) for num_steps, size in training["batch_ramp"])
    old, new = BatchSizes(training["global_batch_size"], ramp), recipe.training.batch_sizes
    # The readers of a stream are as many as divide every size.
    same_readers = recipe.data.source != "stream" or old.divisor() == new.divisor()
    return same_readers and old.until(num_taken) == new.until(num_taken)


def _same_held_out(before: dict[str, Any], recipe: PretrainRecipe) -> bool:
    """Whether the same sequences are held out from training: none if there are other data to validate on."""
    data = recipe.data
    holds_out = data.source not in ("stream", "synthetic") and data.holdout_every > 0
    return not holds_out or bool(before["data"].get("validation_path")) == bool(data.validation_path)


def _default_recipe(recipe: PretrainRecipe) -> dict[str, Any]:
    default = type(recipe)()
    same_model = isinstance(default.model, type(recipe.model))
    return recipe_as_json(default if same_model else dataclasses.replace(default, model=type(recipe.model)()))


def _with_new_keys(old: dict[str, Any], new: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Adds keys that did not exist when `old` was written. Their default is the earlier behavior."""
    completed = dict(old)
    for key, default in defaults.items():
        if key not in old and key in new:
            completed[key] = default
        elif isinstance(default, dict) and isinstance(old[key], dict):
            completed[key] = _with_new_keys(old[key], new[key], default)
    return completed


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Describes each changed value, by its dotted key."""
    found: dict[str, str] = {}
    for key in old | new:
        name = f"{prefix}{key}"
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found |= changed_keys(before, after, f"{name}.")
        elif before != after:
            found[name] = f"{name} was {json.dumps(before)}, now {json.dumps(after)}"
    return found
