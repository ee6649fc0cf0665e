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
    is_local = model.num_local() > 0 and model.sliding_window < training.seq_len
    masked = recipe.data.masks_documents or (f"model.sliding_window = {model.sliding_window}" if is_local else "")
    if masked and recipe.run.allows_cuda and training.attention == "auto":
        yield (
            f"{clip} reads dense masks, but that of {masked} is a block mask on GPUs; set training.attention = 'efficient' or "
            "'math', or optimizer.muon_qk_clip = 0"
        )


def multi_token_problem(recipe: PretrainRecipe) -> str:
    """Returns why multi-token prediction does not support pipelines."""
    return (
        f"parallelism.pipeline = {recipe.parallelism.pipeline}: model.num_mtp_layers = {recipe.model.num_mtp_layers} embeds "
        "further tokens after the last block, but the embedding is in the first stage; use parallelism.shard, tensor, context or "
        "expert instead, or num_mtp_layers = 0"
    )
