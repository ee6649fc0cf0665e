"""torchtitan 0.2.2: its Trainer and its Llama 3, on the task's batches.

    row "shipped"   its defaults: not compiled, activation checkpointing of every second block, fused AdamW
    row "best"      torch.compile for each block and the loss, no activation checkpointing, pinned batches

One process shards nothing, and uses autocast for bfloat16. Difference from its defaults: norms have no weight decay, so that
losses match. float8 is tensorwise, and compiled in both rows, as its documentation recommends. `options` are its own keys:
`activation_checkpoint.mode=selective`.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import Task
from benchmarks.torchtitan_task import TASK, Timed, interleave, plain_name, prepare, set_keys  # before torchtitan

# isort: split
from torchtitan.config import JobConfig
from torchtitan.models import llama3
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer


class Model(llama3.Transformer):
    """torchtitan's Llama 3, initialized with the task's weights."""

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        if TASK.model["tied_head"]:  # its Llama 3 does not support this; its Qwen ties them at this place
            self.output.weight = self.tok_embeddings.weight
        for name, parameter in self.named_parameters():
            weight = TASK.weights[plain_name(name)]
            parameter.copy_(interleave(weight) if name.endswith(("wq.weight", "wk.weight")) else weight)


def batches(pin_memory: bool) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yields the task's micro-batches on the host; torchtitan's step copies them to the device."""
    task = replace(TASK, device="cpu")
    for step in count(1):
        for pair in task.batch(step):
            tokens, labels = (tensor.pin_memory() for tensor in pair) if pin_memory else pair
            yield {"input": tokens}, labels


def build_optimizers(*arguments: Any, **options: Any) -> Any:
    """Builds torchtitan's optimizer, with norms in a parameter group without weight decay."""
    container = llama3.build_optimizers(*arguments, **options)
    for optimizer in container:
        (group,) = optimizer.param_groups
        norms = [parameter for parameter in group["params"] if parameter.dim() < 2]
        group["params"] = [parameter for parameter in group["params"] if parameter.dim() >= 2]
        optimizer.add_param_group({"params": norms, "weight_decay": 0.0})
    return container


def config_of(task: Task) -> JobConfig:
    """Returns the task as torchtitan's job config."""
    config, best, float8 = JobConfig(), task.row == "best", task.precision == "float8"
    folder = str(Path(task.result_file).parent)
    keys: dict[str, Any] = {
        "job.dump_folder": folder, "model.name": "task", "model.flavor": "task",
        "optimizer.lr": task.lr, "optimizer.beta1": task.beta1, "optimizer.beta2": task.beta2,
        "optimizer.eps": task.eps, "optimizer.weight_decay": task.weight_decay,
        "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0,
        "training.steps": task.warmup + task.steps + 1, "training.seq_len": task.seq_len,
        "training.local_batch_size": task.micro_batch_size, "training.global_batch_size": task.batch_size,
        "training.max_norm": task.max_norm,
        "training.mixed_precision_param": "float32" if task.precision == "float32" else "bfloat16",
        "compile.enable": best or float8,
    }  # fmt: skip
    if best:
        keys |= {"activation_checkpoint.mode": "none", "training.dataloader.pin_memory": task.device == "cuda"}
    if float8:
        skipped = ["output", "auto_filter_small_kn"] if best else ["output"]
        keys |= {"model.converters": ["quantize.linear.float8"], "quantize.linear.float8.filter_fqns": skipped}
    set_keys(config, keys | task.options)
    return config


class TimedTrainer(Timed, Trainer):
    """torchtitan's Trainer, on a clock."""


def main() -> None:
    """Trains until the clock ends the process."""
    model = TASK.model
    TimedTrainer.clock = prepare()
    model_args = llama3.TransformerModelArgs(
        dim=model["dim"], n_layers=model["num_layers"], n_heads=model["num_heads"], n_kv_heads=model["num_kv_heads"],
        vocab_size=model["vocab_size"], norm_eps=model["norm_eps"], rope_theta=model["rope_theta"],
        # torchtitan computes ffn_dim as 2/3 * 4 * dim * multiplier, rounded up to a multiple.
        ffn_dim_multiplier=model["ffn_dim"] / (4 * model["dim"]), multiple_of=model["ffn_dim"],
        rope_scaling_args=RoPEScalingArgs(
            scaling_factor=model["rope_scaling"], original_max_position_embeddings=model["rope_original_seq_len"]
        ),
    )  # fmt: skip
    spec = replace(
        llama3.get_train_spec(), model_cls=Model, model_args={"task": model_args}, build_tokenizer_fn=None,
        build_dataloader_fn=lambda job_config, **_: batches(job_config.training.dataloader.pin_memory),
        build_optimizers_fn=build_optimizers, state_dict_adapter=None,
    )  # fmt: skip
    register_train_spec("task", spec)
    TimedTrainer(config_of(TASK)).train()


if __name__ == "__main__":
    main()
