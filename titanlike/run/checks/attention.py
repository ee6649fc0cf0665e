"""Checks of the attention kernel that a recipe selects. Does not import torch."""

from collections.abc import Iterator

from titanlike.recipe import PretrainRecipe
from titanlike.utils.system import num_gpus

FLEX_MIN_HEAD_DIM = 16  # of FlexAttention's kernels for GPUs


def attention_problems(recipe: PretrainRecipe) -> Iterator[str]:
    """Yields a sentence for what the selected kernel does not support, which torch would report at the first step."""
    kernel, model, context = recipe.training.attention, recipe.model, recipe.parallelism.context
    reasons = {
        f"model.attention_soft_cap = {model.attention_soft_cap}": model.attention_soft_cap > 0,
        f"the attention sinks of model.name = {model.name!r}": model.has_sinks,
        recipe.data.masks_documents: recipe.data.masks_documents != "",
        f"model.sliding_window = {model.sliding_window}": model.window_hides(recipe.training.seq_len),
    }
    what = next((reason for reason, holds in reasons.items() if holds), "")
    masked = bool(what) and recipe.run.allows_cuda  # the CPU's flash kernel supports masks
    flex = masked and kernel == "auto"  # these use FlexAttention
    if flex and (recipe.run.device == "cuda" or num_gpus() > 0) and model.head_dim < FLEX_MIN_HEAD_DIM:
        yield (
            f"{what} uses FlexAttention on a GPU, which requires a head dimension of {FLEX_MIN_HEAD_DIM} or "
            f"more, but this model has {model.head_dim}; set training.attention = 'math', or use larger heads"
        )
    if flex and recipe.activation_checkpoint.mode == "selective" and recipe.compile.mode == "none":
        yield (
            f"{what} uses FlexAttention on a GPU, but activation_checkpoint.mode = 'selective' with "
            "compile.mode = 'none' keeps it from being compiled; set compile.mode = 'block', or "
            "activation_checkpoint.mode = 'full'"
        )
    heads, kv_heads = model.num_heads, model.num_kv_heads
    unsupported = (
        ("efficient", kv_heads != heads, f"does not support num_kv_heads = {kv_heads} and num_heads = {heads}"),
        ("cudnn", recipe.run.deterministic, "is not deterministic, but run.deterministic = true"),
        ("flash3 flash4", recipe.training.compute_dtype != "bfloat16", "requires training.compute_dtype = 'bfloat16'"),
        ("cudnn flash flash3 flash4", masked, f"does not support the mask of {what}"),
        ("flash", context == 1 and model.v_head_dim != model.head_dim, "requires heads of one dimension"),
        ("efficient", model.attention_soft_cap > 0, f"does not bound scores as {what} asks"),
        ("efficient", model.has_sinks, f"does not compute {what}"),
        (
            "cudnn efficient math flash3 flash4",
            context > 1 and not what,
            f"is not used with parallelism.context = {context}",
        ),
    )
    for kernels, holds, reason in unsupported:
        if kernel in kernels.split() and holds:
            yield f"training.attention = '{kernel}' {reason}; set training.attention = 'auto'"
