"""nanoGPT (karpathy/nanoGPT, tried at commit 3adf61e): the GPT of its model.py, with the step of its train.py. GPT-2's shape only.

    row "shipped"   train.py's defaults: compiled on a GPU; on a CPU not, as its README says to; AdamW fused on a GPU
    row "best"      compiled, and AdamW fused, on a CPU too; on a GPU that is "shipped" again

Its GELU is the exact one and not the tanh form, so its losses are close and not equal. The loss is not read at every step,
as train.py does to print it: that only makes the host wait. `--path nanogpt=` names the folder of model.py.
"""

import re
import sys
from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor

from benchmarks.protocol import Clock, Task

# titanlike's names of a GPT's weights, and GPT-2's.
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
    """A weight's name with every part replaced that `names` has another one for."""
    for old, new in names.items():
        name = re.sub(old, new, name)
    return name


def gpt2_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A GPT's weights by GPT-2's names: query, key and value are one projection there."""
    found = {}
    for name, value in weights.items():
        if ".wq." in name:
            value = torch.cat([weights[name.replace(".wq.", f".{part}.")] for part in ("wq", "wk", "wv")])
        if ".wk." not in name and ".wv." not in name:
            found[renamed(name, NAMES)] = value
    return found


def load(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Take over the weights, all of them; only a head that is the embedding may have none of its own."""
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)


def main() -> None:
    """Train the task's model."""
    task = Task.read()
    shape = task.model
    if shape["name"] != "gpt" or shape["norm_eps"] != 1e-5 or task.eps != 1e-8 or task.precision == "float8":
        print("nanoGPT trains a GPT with norms and AdamW of its own epsilons, in float32 or bfloat16", file=sys.stderr)
        sys.exit(2)
    from model import GPT, GPTConfig  # after the refusal, which needs no nanoGPT

    best, gpu = task.row == "best", task.device == "cuda"
    clock = Clock(task)
    model = GPT(
        GPTConfig(
            block_size=shape["max_seq_len"], vocab_size=shape["vocab_size"], n_layer=shape["num_layers"],
            n_head=shape["num_heads"], n_embd=shape["dim"], dropout=0.0, bias=True,
        )
    )  # fmt: skip
    load(model, gpt2_weights(task.weights))
    model.to(task.device)
    # The kind of device decides about one thing there, whether AdamW is fused. torch has a fused one for a CPU by now.
    betas, kind = (task.beta1, task.beta2), "cuda" if best or gpu else "cpu"
    optimizer = model.configure_optimizers(task.weight_decay, task.lr, betas, kind)
    # On a CPU train.py has no autocast; it is the same line that gives it bfloat16.
    context = torch.amp.autocast(device_type=task.device, dtype=torch.bfloat16, enabled=task.precision == "bfloat16")
    compute = torch.compile(model) if best or gpu else model
    following = task.batch(1)
    for step in count(1):
        mean = torch.zeros((), device=task.device)
        batch = following
        for number, (tokens, labels) in enumerate(batch):
            with context:
                _, loss = compute(tokens, labels)
                loss = loss / task.num_microbatches
            if number == 0:  # as train.py: while a GPU is busy with the forward pass
                following = task.batch(step + 1)
            loss.backward()
            mean += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step(mean)


if __name__ == "__main__":
    main()
