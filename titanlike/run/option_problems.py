"""What options that few recipes have do not support. Does not import torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from titanlike.config import UserError
from titanlike.config.layout import SCHEDULES
from titanlike.config.optimizer import Optimizer
from titanlike.config.sections import Parallelism
from titanlike.interop.hf_folder import config_problems, is_hf_folder, read_config, tensor_files
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import all_configs
from titanlike.recipe import PretrainRecipe


def group_problems(recipe: PretrainRecipe, optimizer: Optimizer) -> Iterator[str]:
    """Yields a sentence for each group of an optimizer that has no parameter, and for what Muon cannot have."""
    model, lora = recipe.model, getattr(recipe, "lora", None)
    parameters = model.parameters()
    names = {name for name, spec in parameters.items() if not spec.keeps_float32}
    matrices = {name for name in names if len(parameters[name].shape) > 1 and not name.endswith("bias")}
    if lora and lora.rank:  # all other parameters are frozen
        linears = [name for name in model.matrices() if name.startswith("layers.") and lora.selects(name)]
        names = matrices = {f"{name}.lora_{one}" for name in linears for one in "AB"}
    used = {optimizer.group_of(name, is_matrix=name in matrices) for name in names}
    for group in dict.fromkeys(optimizer.groups):
        if group not in used:
            yield (
                f"optimizer.groups: no parameter is left for pattern = {group.pattern!r} with optimizer = {group.optimizer!r}; a "
                "pattern consists of parts of a name such as layers.0.attention.wq.weight, and the first group that matches applies"
            )
    if all(group.optimizer != "muon" for group in optimizer.groups):
        return
    refused = "optimizer = 'muon' does not support "
    if recipe.parallelism.cpu_offload:
        yield f"{refused}parallelism.cpu_offload = true, where the host would orthogonalize; set it to false"
    if optimizer.muon_qk_clip:
        yield from qk_clip_problems(recipe, optimizer.muon_qk_clip)
    if recipe.parallelism.tensor > 1 and _stacks_of_muon(recipe, optimizer):
        yield (
            f"{refused}parallelism.tensor = {recipe.parallelism.tensor} for experts, whose matrices it would divide; use "
            "parallelism.expert, or a pattern that does not match experts"
        )


def _stacks_of_muon(recipe: PretrainRecipe, optimizer: Optimizer) -> list[tuple[int, ...]]:
    """Returns the shapes of the stacked matrices of experts that Muon updates."""
    last, found = recipe.model.num_layers - 1, []
    for name, shape in recipe.model.expert_parameters().items():
        group = optimizer.group_of(f"layers.{last}.{name}", is_matrix=True)
        found += [shape] if group is not None and group.optimizer == "muon" else []
    return found


def sharded_experts_problem(recipe: PretrainRecipe, optimizer: Optimizer, layout: Parallelism) -> Iterator[str]:
    """Yields a sentence if FSDP would divide the matrices of experts, because they are too few for its ranks."""
    num_experts, num_shards = recipe.model.num_experts // layout.expert, layout.shard * layout.context // layout.expert
    rows = [shape[1] for shape in _stacks_of_muon(recipe, optimizer)]
    if num_shards and num_experts % num_shards and any(size % num_shards == 0 for size in rows):
        yield (
            f"optimizer = 'muon' needs whole matrices, but {num_experts} experts are sharded over {num_shards} ranks; use a "
            "smaller parallelism.shard with parallelism.replicate, or a pattern that does not match experts"
        )


def qk_clip_problems(recipe: PretrainRecipe, threshold: float) -> Iterator[str]:
    """Yields a sentence for what a recipe with `optimizer.muon_qk_clip` cannot have."""
    model, training = recipe.model, recipe.training
    clip = f"optimizer.muon_qk_clip = {threshold}"
    bounds = {
        "QK-norm": model.qk_norm,
        "attention_soft_cap": model.attention_soft_cap > 0,
        "bidirectional attention": not model.causal,
        "an encoder": model.is_encoder_decoder,
    }
    for bound in (name for name, holds in bounds.items() if holds):
        yield f"{clip} is for decoders whose logits nothing else bounds, but model.name = '{model.name}' has {bound}; set it to 0"
    sinks = f"the attention sinks of model.name = '{model.name}'" if model.has_sinks else ""
    window = f"model.sliding_window = {model.sliding_window}" if model.window_hides(training.seq_len) else ""
    masked = recipe.data.masks_documents or sinks or window
    if masked and recipe.run.allows_cuda and training.attention == "auto":
        has_kernel = model.num_kv_heads == model.num_heads and not sinks
        yield (
            f"{clip} reads dense masks, but the mask of {masked} is a block mask on GPUs; set training.attention = "
            + ("'efficient' or " if has_kernel else "")
            + "'math', or optimizer.muon_qk_clip = 0"
        )


def pipeline_problems(recipe: PretrainRecipe) -> Iterator[str]:
    """Yields a sentence for the first thing that is wrong with the pipeline stages, whatever the batch."""
    parallelism, num_layers = recipe.parallelism, recipe.model.num_layers
    pipeline, name, split = parallelism.pipeline, parallelism.pipeline_schedule, parallelism.pipeline_split
    if mtp := recipe.model.num_mtp_layers:
        yield (
            f"parallelism.pipeline = {pipeline}: model.num_mtp_layers = {mtp} embeds further tokens after the last block, but the "
            "embedding is in the first stage; use parallelism.shard, tensor, context or expert instead, or num_mtp_layers = 0"
        )
        return
    schedule = SCHEDULES[name]
    per_rank = len(split) // pipeline or parallelism.pipeline_stages or schedule.stages_per_rank
    num_stages = per_rank * pipeline
    if schedule.fixed and per_rank != schedule.stages_per_rank:
        yield (
            f"parallelism.pipeline_schedule = '{name}' has {schedule.stages_per_rank} stage(s) on each rank, not {per_rank}; "
            f"use {schedule.stages_per_rank}"
            + (", or another schedule such as 'interleaved_1f1b'" if num_stages <= num_layers else "")
        )
    elif parallelism.pipeline_stages and num_stages > num_layers:
        fitting = num_layers // pipeline
        yield (
            f"parallelism.pipeline_stages x pipeline = {per_rank} x {pipeline} = {num_stages}, but model.num_layers = "
            f"{num_layers}; " + (f"use pipeline_stages = {fitting} or less" if fitting else "reduce pipeline")
        )
    elif not split and num_stages > num_layers:
        yield (
            f"parallelism.pipeline = {pipeline} makes {num_stages} stages with the schedule '{name}', but "
            f"model.num_layers = {num_layers}; use {max(num_layers // per_rank, 1)} or less"
        )
    elif split and sum(split) != num_layers:
        yield (
            f"parallelism.pipeline_split = {list(split)} has {sum(split)} blocks, but model.num_layers = {num_layers}; "
            "make them equal, or remove pipeline_split"
        )
    elif schedule.splits_backward and (recipe.activation_checkpoint.mode, recipe.compile.mode) == ("selective", "none"):
        yield (
            f"parallelism.pipeline_schedule = '{name}' runs two backward passes through a block, and activation_checkpoint.mode "
            "= 'selective' supports one; use mode = 'full', compile.mode = 'block', or the schedule '1f1b'"
        )


def initial_weights_problems(recipe: PretrainRecipe) -> Iterator[str]:
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
