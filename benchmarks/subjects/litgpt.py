"""litgpt: its GPT configured as a Llama, and `main` of its `litgpt/pretrain.py` with Fabric, on the task's batches.

    row "shipped"   its defaults: full model compiled, loss in chunks of 128 tokens, every step logged
    row "best"      unchunked loss, fused AdamW also on a CPU, no logging

Differences from its defaults: bfloat16 runs use "bf16-mixed" like all other subjects, not bfloat16 weights, and norms have no
weight decay, so that losses match. It has no float8 training. `options`: `chunk_size` and `log_interval`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning
import torch
from litgpt import pretrain
from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.model import GPT
from litgpt.utils import choose_logger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.protocol import Clock, Task

PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}  # names in Fabric
NAMES = {
    "tok_embeddings": "transformer.wte", "output": "lm_head", "norm": "transformer.ln_f", "layers": "transformer.h",
    "attention_norm": "norm_1", "ffn_norm": "norm_2", "attention": "attn", "wo": "proj",
    "feed_forward": "mlp", "w1": "fc_1", "w2": "proj", "w3": "fc_2",
}  # fmt: skip


class Sequences(IterableDataset):
    """The task's micro-batches on the host, (micro_batch_size, seq_len + 1)."""

    def __init__(self, task: Task) -> None:
        self.task = replace(task, device="cpu")

    def __iter__(self) -> Iterator[Tensor]:
        for step in count(1):
            for tokens, labels in self.task.batch(step):
                yield torch.cat((tokens, labels[:, -1:]), dim=1)


class Data(DataModule):
    """The data module. litgpt reads two validation batches as a sanity check."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.loader = partial(DataLoader, Sequences(task), batch_size=None, pin_memory=task.device == "cuda")

    def connect(self, **_: Any) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        return self.loader()

    def val_dataloader(self) -> DataLoader:
        return self.loader()


class AdamW(torch.optim.AdamW):
    """AdamW with parameter groups. Its signature has no `fused`, which litgpt would disable on a CPU."""

    def __init__(self, parameters: Iterable[Tensor], weight_decay: float, **options: Any) -> None:
        parameters = list(parameters)
        decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
        norms = [parameter for parameter in parameters if parameter.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
        super().__init__(groups, **options)


class TimedFabric(lightning.Fabric):
    """Fabric that reports the loss of each step to the clock."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(callbacks=[self], **options)
        self.clock = clock
        self.losses: list[Tensor] = []

    def backward(self, tensor: Tensor, *others: Any, **options: Any) -> None:
        """Accumulates the micro-batch's share of the step's mean loss."""
        self.losses.append(tensor.detach())
        super().backward(tensor, *others, **options)

    def on_after_optimizer_step(self, **_: Any) -> None:
        """Fabric calls this on its callbacks."""
        loss = torch.stack(self.losses).sum()
        self.losses.clear()
        self.clock.step(loss)


def config_of(task: Task) -> Config:
    """Returns the task's model as litgpt's config. Both use rotate-half RoPE."""
    model = task.model
    scaling = dict(
        factor=model["rope_scaling"], low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_seq_len=model["rope_original_seq_len"],
    )  # fmt: skip
    return Config(
        name="task", block_size=task.seq_len, n_layer=model["num_layers"], n_embd=model["dim"],
        vocab_size=model["vocab_size"], padded_vocab_size=model["vocab_size"], n_head=model["num_heads"],
        n_query_groups=model["num_kv_heads"], intermediate_size=model["ffn_dim"], norm_eps=model["norm_eps"],
        rope_base=model["rope_theta"], rope_adjustments=scaling if model["rope_scaling"] != 1.0 else None,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    )  # fmt: skip


def initialize_weights(task: Task, fabric: lightning.Fabric, model: GPT, **_: Any) -> None:
    """Loads the task's weights by litgpt's names, with fused query, key and value projections."""
    weights = dict(task.weights)
    weights.setdefault("output.weight", weights["tok_embeddings.weight"])  # tied, as by `tie_embeddings`
    for layer in range(task.model["num_layers"]):
        parts = [weights.pop(f"layers.{layer}.attention.{part}.weight") for part in ("wq", "wk", "wv")]
        weights[f"layers.{layer}.attention.qkv.weight"] = torch.cat(parts)
    model.load_state_dict(
        {".".join(NAMES.get(part, part) for part in name.split(".")): weights[name] for name in weights}
    )


def main() -> None:
    """Trains until the clock ends the process."""
    task = Task.read()
    if task.precision not in PRECISIONS:
        raise ValueError(f"litgpt supports {' and '.join(PRECISIONS)}, not {task.precision}")
    clock = Clock(task, ("litgpt", "lightning"))
    best, folder, config = task.row == "best", Path(task.result_file).parent, config_of(task)
    options = {"chunk_size": 0, "log_interval": 10**9} if best else {"chunk_size": 128, "log_interval": 1}
    options |= {key: int(value) for key, value in task.options.items()}
    train = TrainArgs(
        save_interval=None, log_interval=options["log_interval"], global_batch_size=task.batch_size,
        micro_batch_size=task.micro_batch_size, max_tokens=(task.warmup + task.steps + 1) * task.batch_size * task.seq_len,
        max_norm=task.max_norm, min_lr=task.lr, lr_warmup_steps=0, tie_embeddings=task.model["tied_head"],
    )  # fmt: skip
    adamw = {"lr": task.lr, "betas": (task.beta1, task.beta2), "eps": task.eps, "weight_decay": task.weight_decay}
    adamw["fused"] = best or task.device == "cuda"  # litgpt's default
    logger = choose_logger("tensorboard", folder, name="pretrain-task", log_args=asdict(LogArgs()))
    fabric = TimedFabric(
        clock,
        accelerator=task.device,
        devices=1,
        precision=PRECISIONS[task.precision],
        loggers=[] if best else [logger],
    )
    fabric.launch()
    pretrain.initialize_weights = partial(initialize_weights, task)
    pretrain.chunked_cross_entropy = partial(pretrain.chunked_cross_entropy, chunk_size=options["chunk_size"])
    pretrain.main(
        fabric=fabric, devices=1, seed=task.seed, initial_checkpoint_dir=None, resume=False, config=config, data=Data(task),
        out_dir=folder, tokenizer_dir=None, tokenizer=None, train=train, eval=EvalArgs(interval=10**9, max_iters=100),
        optimizer={"class_path": f"{__name__}.AdamW", "init_args": adamw},
    )  # fmt: skip


if __name__ == "__main__":
    main()
