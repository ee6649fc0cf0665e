"""Checks of the optimizer: its states, its groups, and what Muon does not support. Does not import torch."""

from collections.abc import Iterator

from titanlike.config.layout import BLOCK
from titanlike.config.optimizer import Optimizer
from titanlike.config.sections import Parallelism
from titanlike.recipe import PretrainRecipe


def adamw_section(recipe: PretrainRecipe) -> Optimizer:
    """Returns the section of AdamW, with its defaults if the program has another optimizer and a section of its own for it."""
    return recipe.optimizer if isinstance(recipe.optimizer, Optimizer) else Optimizer()


def optimizer_problems(recipe: PretrainRecipe) -> Iterator[str]:
    """Yields a sentence for each value of the optimizer that does not fit the model or another section."""
    model, optimizer = recipe.model, adamw_section(recipe)
    rows = [*model.matrices().values(), *model.expert_parameters().values()]
    if optimizer.state_dtype == "8bit" and all(shape[-1] % BLOCK for shape in rows):
        yield (
            f"optimizer.state_dtype = '8bit' quantizes rows of a multiple of {BLOCK} elements, and no matrix of this model has one "
            f"(model.dim = {model.dim}); use a multiple of {BLOCK}, or state_dtype = 'bfloat16' or 'full'"
        )
    moments = recipe.training.master_dtype if optimizer.state_dtype == "full" else optimizer.state_dtype
    if moments == "bfloat16" and optimizer.beta2 > 0.98:
        yield (
            f"optimizer.state_dtype = '{optimizer.state_dtype}' cannot represent a second moment, in bfloat16, with beta2 = "
            f"{optimizer.beta2}: the change of a step is below its precision; use beta2 = 0.98 or less, or state_dtype = '8bit'"
        )
    if optimizer.groups:
        yield from _group_problems(recipe, optimizer)


def _group_problems(recipe: PretrainRecipe, optimizer: Optimizer) -> Iterator[str]:
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
    if recipe.parallelism.tensor > 1 and _expert_shapes(recipe, optimizer):
        yield (
            f"{refused}parallelism.tensor = {recipe.parallelism.tensor} for experts, whose matrices it would divide; use "
            "parallelism.expert, or a pattern that does not match experts"
        )


def _expert_shapes(recipe: PretrainRecipe, optimizer: Optimizer) -> list[tuple[int, ...]]:
    """Returns the shapes of the stacked matrices of experts that Muon updates."""
    last, found = recipe.model.num_layers - 1, []
    for name, shape in recipe.model.expert_parameters().items():
        group = optimizer.group_of(f"layers.{last}.{name}", is_matrix=True)
        found += [shape] if group is not None and group.optimizer == "muon" else []
    return found


def sharded_experts_problem(recipe: PretrainRecipe, optimizer: Optimizer, layout: Parallelism) -> Iterator[str]:
    """Yields a sentence if FSDP would divide the matrices of experts, because they are too few for its ranks."""
    num_experts, num_shards = recipe.model.num_experts // layout.expert, layout.shard * layout.context // layout.expert
    rows = [shape[1] for shape in _expert_shapes(recipe, optimizer)]
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
        "QK-norm": "attention.k_norm.weight" in model.block_parameters(),
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
