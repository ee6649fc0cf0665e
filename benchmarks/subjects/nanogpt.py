"""nanoGPT (karpathy/nanoGPT, tried at commit 3adf61e): the GPT of its model.py, with the step of its train.py. GPT-2 only.

    row "shipped"   train.py's defaults: compiled with fused AdamW on a GPU; neither on a CPU, like its README
    row "best"      compiled with fused AdamW, also on a CPU; on a GPU the same as "shipped"

It uses the exact GELU and not the tanh approximation, so its losses are close but not equal. Unlike train.py, it does not read
the loss in each step, which would synchronize the host. `--path nanogpt=` is the folder of model.py.
"""

import re
import sys
from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor

from benchmarks.protocol import Clock, Task

# titanlike's names of GPT weights -> GPT-2's names.
NAMES = {
    r"^tok_embeddings": "transformer.wte",
    r"^pos_embeddings": "transformer.wpe",
    r"^norm": "transformer.ln_f",
    r"^layers": "transformer.h",
    r"attention_norm": "ln_1",
    r"ffn_norm": "ln_2",
    r"attention\.wq": "attn.c_attn",
    r"attention\.wo": "attn.c_proj",
    r"feed_forward\.w1": "mlp.c_fc",
    r"feed_forward\.w2": "mlp.c_proj",
}


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Replaces the parts of a weight's name by the patterns of `names`."""
    for old, new in names.items():
        name = re.sub(old, new, name)
    return name


def gpt2_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns GPT weights by GPT-2's names, with fused query, key and value projections."""
    found = {}
    for name, value in weights.items():
        if ".wq." in name:
            value = torch.cat([weights[name.replace(".wq.", f".{part}.")] for part in ("wq", "wk", "wv")])
        if ".wk." not in name and ".wv." not in name:
            found[renamed(name, NAMES)] = value
    return found


def load(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads all weights. Only a tied head may be missing."""
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)


def main() -> None:
    """Trains the task's model."""
    task = Task.read()
    task_config = task.model
    if task_config["name"] != "gpt" or task.eps != 1e-8 or task.precision == "float8":
        print("nanoGPT supports a GPT with AdamW eps 1e-8, in float32 or bfloat16", file=sys.stderr)
        sys.exit(2)
    from model import GPT, GPTConfig  # after the check, which does not need nanoGPT

    best, gpu = task.row == "best", task.device == "cuda"
    clock = Clock(task)
    model = GPT(
        GPTConfig(
            block_size=task_config["max_seq_len"], vocab_size=task_config["vocab_size"], n_layer=task_config["num_layers"],
            n_head=task_config["num_heads"], n_embd=task_config["dim"], dropout=0.0, bias=True,
        )
    )  # fmt: skip
    load(model, gpt2_weights(task.weights))
    model.to(task.device)
    # nanoGPT uses the device type only to select fused AdamW, which torch also supports on a CPU.
    betas, device_type = (task.beta1, task.beta2), "cuda" if best or gpu else "cpu"
    optimizer = model.configure_optimizers(task.weight_decay, task.lr, betas, device_type)
    # train.py has no autocast on a CPU.
    context = torch.amp.autocast(device_type=task.device, dtype=torch.bfloat16, enabled=task.precision == "bfloat16")
    compute = torch.compile(model) if best or gpu else model
    next_batch = task.batch(1)
    for step in count(1):
        mean = torch.zeros((), device=task.device)
        batch = next_batch
        for number, (tokens, labels) in enumerate(batch):
            with context:
                _, loss = compute(tokens, labels)
                loss = loss / task.num_microbatches
            if number == 0:  # like train.py: while the GPU computes the forward pass
                next_batch = task.batch(step + 1)
            loss.backward()
            mean += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step(mean)


if __name__ == "__main__":
    main()
