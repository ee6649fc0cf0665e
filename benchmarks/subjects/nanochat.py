"""nanochat (karpathy/nanochat, tried at commit 92d63d4): its GPT and its optimizers, with the step of its scripts/base_train.py.

    SAME WIDTH AND DEPTH, ANOTHER ARCHITECTURE

relu^2, QK norm, value embeddings, logit soft-capping, its own initial weights, Muon with AdamW, and no gradient clipping. Width,
depth, heads, vocabulary, sequences and tokens are the task's. The losses are not comparable.

    row "shipped"   base_train's defaults: compiled, also on a CPU; sliding-window attention (SSSL) with Flash Attention 3,
                    full attention without, like base_train and runs/runcpu.sh
    row "best"      the same: base_train has no faster option

float8 is its `--fp8`. In bfloat16 its embeddings are bfloat16, too. Unlike base_train, it does not read the loss in each step,
which would synchronize the host. `--path nanochat=` is its folder, and
`--option nanochat.best:window_pattern=SSSL` sets the windows.
"""

import os

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # like base_train, before torch reads it

import gc
import math
import sys
from itertools import count

import torch
from torch import nn

from benchmarks.protocol import Clock, Task


def is_converted(module: nn.Module, name: str) -> bool:
    """Whether base_train's `--fp8` converts a layer."""
    if not isinstance(module, nn.Linear):
        return False
    sizes = module.in_features, module.out_features
    return min(sizes) >= 128 and all(size % 16 == 0 for size in sizes)


def main() -> None:
    """Trains a model of the task's width and depth."""
    task = Task.read()
    if task.precision == "float8" and task.device != "cuda":
        print("nanochat supports float8 on a GPU only", file=sys.stderr)
        sys.exit(2)
    os.environ["NANOCHAT_DTYPE"] = "float32" if task.precision == "float32" else "bfloat16"  # read at import
    from nanochat.common import compute_init
    from nanochat.flash_attention import USE_FA3
    from nanochat.fp8 import convert_to_float8_training
    from nanochat.gpt import GPT, GPTConfig

    clock = Clock(task)
    *_, device = compute_init(task.device)
    if task.precision == "float32":
        torch.set_float32_matmul_precision("highest")  # base_train uses TF32; the float32 benchmark does not
    task_config = task.model
    config = GPTConfig(
        sequence_len=task.seq_len, vocab_size=task_config["vocab_size"], n_layer=task_config["num_layers"],
        n_head=task_config["num_heads"],
        n_kv_head=task_config.get("num_kv_heads", task_config["num_heads"]), n_embd=task_config["dim"],
        window_pattern=task.options.get("window_pattern", "SSSL" if USE_FA3 else "L"),
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    if task.precision == "float8":
        convert_to_float8_training(model, module_filter_fn=is_converted)
    compute = torch.compile(model, dynamic=False)
    # base_train's default learning rates, scaled by its rule for the batch size.
    scale = math.sqrt(task.batch_size * task.seq_len / 2**19)
    rates = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "scalar_lr": 0.5}
    optimizer = model.setup_optimizer(**{name: rate * scale for name, rate in rates.items()}, weight_decay=0.28)
    next_batch = task.batch(1)
    for step in count(1):
        mean = torch.zeros((), device=device)
        batch = next_batch
        for number, (tokens, labels) in enumerate(batch):
            loss = compute(tokens, labels)
            mean += loss.detach() / task.num_microbatches
            (loss / task.num_microbatches).backward()
            if number == 0:  # like base_train: while the GPU computes
                next_batch = task.batch(step + 1)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if step == 1:  # like base_train: no pauses for garbage collection
            gc.collect()
            gc.freeze()
            gc.disable()
        clock.step(mean)


if __name__ == "__main__":
    main()
