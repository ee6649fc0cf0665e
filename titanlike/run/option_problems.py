"""What options that few recipes have do not support. Does not import torch."""

from collections.abc import Iterator

from titanlike.config import PretrainRecipe
from titanlike.config.optimizer import Optimizer
from titanlike.config.sections import Parallelism


def group_problems(recipe: PretrainRecipe, optimizer: Optimizer) -> Iterator[str]:
    """Yields a sentence for each group of an optimizer that has no parameter, and for what Muon cannot have."""
    model, lora = recipe.model, getattr(recipe, "lora", None)
    parameters = model.parameters()
    names = {name for name in parameters if not name.endswith("expert_bias")}
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
            f"{clip} reads dense masks, but that of {masked} is a block mask on GPUs; set training.attention = "
            + ("'efficient' or " if has_kernel else "")
            + "'math', or optimizer.muon_qk_clip = 0"
        )


def multi_token_problem(recipe: PretrainRecipe) -> str:
    """Returns why multi-token prediction does not support pipelines."""
    return (
        f"parallelism.pipeline = {recipe.parallelism.pipeline}: model.num_mtp_layers = {recipe.model.num_mtp_layers} embeds "
        "further tokens after the last block, but the embedding is in the first stage; use parallelism.shard, tensor, context or "
        "expert instead, or num_mtp_layers = 0"
    )
