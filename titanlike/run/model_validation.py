"""Checks of a recipe's model, attention kernel and LoRA. Does not import torch."""

from titanlike.config import PretrainRecipe
from titanlike.config.base import matches
from titanlike.utils.system import num_gpus

FLEX_MIN_HEAD_DIM = 16  # of FlexAttention's kernels for GPUs


def model_problems(recipe: PretrainRecipe) -> list[str]:
    """Returns the problems of the model's own fields, and of its length."""
    model, seq_len = recipe.model, recipe.training.seq_len
    problems = model.problems()
    if seq_len > model.max_seq_len:
        problems.append(
            f"training.seq_len = {seq_len} is longer than the model's max_seq_len = {model.max_seq_len}; "
            f"use {model.max_seq_len} or less, or raise model.max_seq_len"
        )
    return problems


def attention_problems(recipe: PretrainRecipe) -> list[str]:
    """Returns what the selected kernel does not support, which torch would report at the first step."""
    kernel, model, context = recipe.training.attention, recipe.model, recipe.parallelism.context
    window, soft_cap = model.sliding_window, model.attention_soft_cap
    reasons = {
        f"model.attention_soft_cap = {soft_cap}": soft_cap > 0,
        "data.document_masks = true": recipe.data.document_masks,
        f"data.source = '{recipe.data.source}'": "chat" in recipe.data.source,
        f"model.sliding_window = {window}": model.num_local() > 0 and window < recipe.training.seq_len,
    }
    what = next((reason for reason, holds in reasons.items() if holds), "")
    heads = (getattr(model, "num_kv_heads", model.num_heads), model.num_heads)
    masked = bool(what) and recipe.run.allows_cuda  # the CPU's flash kernel supports masks
    flex = masked and kernel == "auto"  # these use FlexAttention
    problems = []
    on_gpu = recipe.run.device == "cuda" or num_gpus() > 0
    if flex and on_gpu and model.head_dim < FLEX_MIN_HEAD_DIM:
        problems.append(
            f"{what} uses FlexAttention on a GPU, which requires a head dimension of {FLEX_MIN_HEAD_DIM} or "
            f"more, but that of this model is {model.head_dim}; set training.attention = 'math', or use larger heads"
        )
    if flex and recipe.activation_checkpoint.mode == "selective" and recipe.compile.mode == "none":
        problems.append(
            f"{what} uses FlexAttention on a GPU, but activation_checkpoint.mode = 'selective' with "
            "compile.mode = 'none' keeps it from being compiled; set compile.mode = 'block', or "
            "activation_checkpoint.mode = 'full'"
        )
    unsupported = (
        ("efficient", heads[0] != heads[1], "does not support num_kv_heads = {} and num_heads = {}".format(*heads)),
        ("cudnn", recipe.run.deterministic, "is not deterministic, but run.deterministic = true"),
        ("flash3 flash4", recipe.training.compute_dtype != "bfloat16", "requires training.compute_dtype = 'bfloat16'"),
        ("cudnn flash flash3 flash4", masked, f"does not support the mask of {what}"),
        ("efficient", soft_cap > 0, f"does not bound scores as {what} asks"),
        (
            "cudnn efficient math flash3 flash4",
            context > 1 and not what,
            f"is not used with parallelism.context = {context}",
        ),
    )
    return problems + [
        f"training.attention = '{kernel}' {reason}; set training.attention = 'auto'"
        for kernels, holds, reason in unsupported
        if kernel in kernels.split() and holds
    ]


def lora_problems(recipe: PretrainRecipe) -> list[str]:
    """Returns the problems of LoRA. A pipeline stage without a trained layer would have no backward pass."""
    lora, model = recipe.lora, recipe.model
    if not lora.rank:
        return (
            [f"lora.layers = {list(lora.layers)} has no effect with lora.rank = 0; set lora.rank"]
            if lora.layers
            else []
        )
    names = [name for name in model.matrices() if name.startswith("layers.")]
    problems = [
        f"lora.layers: {pattern!r} matches no linear layer ({', '.join(model.block_matrices())} in each of layers.0 to "
        f"layers.{model.num_layers - 1})"
        for pattern in lora.layers
        if not any(matches(pattern, name) for name in names)
    ]
    if recipe.float8.scaling != "none":
        problems.append(
            f"lora.rank = {lora.rank} and float8.scaling = {recipe.float8.scaling!r} are not supported together; set one of them "
            "to 0 or 'none'"
        )
    selected = {int(name.split(".")[1]) for name in names if lora.selects(name)}
    stages = recipe.parallelism.split(model) if recipe.parallelism.pipeline > 1 and not problems else []
    first = 0
    for number, size in enumerate(stages):
        if selected.isdisjoint(range(first, first + size)):
            problems.append(
                f"lora.layers selects nothing in blocks {first} to {first + size - 1}, which are stage {number} of the pipeline; "
                "select layers of all blocks"
            )
        first += size
    return problems
