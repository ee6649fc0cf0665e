"""What options that few recipes have do not support. Does not import torch."""

from collections.abc import Iterator

from titanlike.config import PretrainRecipe


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
