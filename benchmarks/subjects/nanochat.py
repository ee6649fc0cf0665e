"""nanochat (karpathy/nanochat, tried at commit 92d63d4): its GPT and its optimizers, with the step of its scripts/base_train.py.

    SAME WIDTH AND DEPTH, ANOTHER ARCHITECTURE

relu^2, QK norm, value embeddings, a soft cap on the logits, its own first weights, Muon beside AdamW, and no clipping: width,
depth, heads, vocabulary, sequences and tokens are the task's, so the losses cannot agree.

    row "shipped"   base_train's defaults: compiled, on a CPU too; windows of attention (SSSL) where it has Flash Attention 3,
                    and full attention where it has not, as base_train and runs/runcpu.sh say to
    row "best"      the same: base_train has no faster option

float8 is its `--fp8`. It keeps its embeddings in bfloat16 where it computes in it. The loss is not read at every step, as
base_train does to print it: that only makes the host wait. `--path nanochat=` names its folder, and
`--option nanochat.best:window_pattern=SSSL` other windows.
"""

import os

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as base_train, before torch looks

import gc
import math
import sys
from itertools import count

import torch
from torch import nn

from benchmarks.protocol import Clock, Task


def takes_float8(module: nn.Module, name: str) -> bool:
    """The layers that base_train's `--fp8` converts."""
    if not isinstance(module, nn.Linear):
        return False
    sizes = module.in_features, module.out_features
    return min(sizes) >= 128 and all(size % 16 == 0 for size in sizes)


def main() -> None:
    """Train a model of the task's width and depth."""
    task = Task.read()
    if task.precision == "float8" and task.device != "cuda":
        print("nanochat trains in float8 on a GPU only", file=sys.stderr)
        sys.exit(2)
    os.environ["NANOCHAT_DTYPE"] = "float32" if task.precision == "float32" else "bfloat16"  # read at its import
    from nanochat.common import compute_init
    from nanochat.flash_attention import USE_FA3
    from nanochat.fp8 import convert_to_float8_training
    from nanochat.gpt import GPT, GPTConfig

    clock = Clock(task)
    *_, device = compute_init(task.device)
    if task.precision == "float32":
        torch.set_float32_matmul_precision("highest")  # not base_train's TF32, where float32 is what is measured
    shape = task.model
    config = GPTConfig(
        sequence_len=task.seq_len, vocab_size=shape["vocab_size"], n_layer=shape["num_layers"],
        n_head=shape["num_heads"], n_kv_head=shape.get("num_kv_heads", shape["num_heads"]), n_embd=shape["dim"],
        window_pattern=task.options.get("window_pattern", "SSSL" if USE_FA3 else "L"),
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    if task.precision == "float8":
        convert_to_float8_training(model, module_filter_fn=takes_float8)
    compute = torch.compile(model, dynamic=False)
    # base_train's default rates, with its scale for the size of a batch.
    scale = math.sqrt(task.batch_size * task.seq_len / 2**19)
    rates = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "scalar_lr": 0.5}
    optimizer = model.setup_optimizer(**{name: rate * scale for name, rate in rates.items()}, weight_decay=0.28)
    following = task.batch(1)
    for step in count(1):
        mean = torch.zeros((), device=device)
        batch = following
        for number, (tokens, labels) in enumerate(batch):
            loss = compute(tokens, labels)
            mean += loss.detach() / task.num_microbatches
            (loss / task.num_microbatches).backward()
            if number == 0:  # as base_train: while a GPU is busy with the two passes
                following = task.batch(step + 1)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if step == 1:  # as base_train: no pauses to look for garbage
            gc.collect()
            gc.freeze()
            gc.disable()
        clock.step(mean)


if __name__ == "__main__":
    main()
