"""torchtitan 0.2.2: its Trainer and its Llama 3, fed with the task's batches.

    row "shipped"   its defaults: nothing compiled, every second block's activations computed twice, fused AdamW
    row "best"      its torch.compile for each block and the loss, no activations computed twice, pinned batches

With one process it shards nothing: bfloat16 comes by autocast. Its AdamW would decay the norms' weights too; here it does as
all others do, or the losses part. float8 is tensorwise, and compiled in both rows, as its documents ask for.
`options` are its own keys: `activation_checkpoint.mode=selective`.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import Clock, Task

if Task.read().device == "cpu":
    # It looks for the machine's accelerator while it is imported, and takes CUDA where there is none.
    torch._utils._get_available_device_type = lambda: "cpu"
    # Every import of it comes by its experts' kernels, and they by triton, which a torch for CPUs lacks. Llama has no experts.
    kernels = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels

from torchtitan.components import metrics
from torchtitan.config import JobConfig
from torchtitan.models import llama3
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

TASK = Task.read()


class Monitor(metrics.DeviceMemoryMonitor):
    """Its own forgets the peak at each line of the log; the clock reads the peak at the end."""

    def reset_peak_stats(self) -> None:
        pass


class NoMonitor:
    """torch.cpu has none of the counters that its own reads."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


class Model(llama3.Transformer):
    """Its model, initialized with the task's weights."""

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        if TASK.model["tied_head"]:  # it knows no such Llama; here is where its Qwen ties them
            self.output.weight = self.tok_embeddings.weight
        for name, parameter in self.named_parameters():
            # Compiled blocks and those whose activations are computed twice have longer names.
            name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            parameter.copy_(interleave(name, TASK.weights[name]))


def interleave(name: str, weight: Tensor) -> Tensor:
    """Queries and keys with the rows that turn together side by side, where titanlike has them half a head apart."""
    if not name.endswith(("wq.weight", "wk.weight")):
        return weight
    head_dim = TASK.model["dim"] // TASK.model["num_heads"]
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def batches(pin_memory: bool) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The task's micro-batches on the host: moving them is a part of its step."""
    task = replace(TASK, device="cpu")
    for step in count(1):
        for pair in task.batch(step):
            tokens, labels = (part.pin_memory() for part in pair) if pin_memory else pair
            yield {"input": tokens}, labels


def build_optimizers(*arguments: Any, **options: Any) -> Any:
    """Its optimizer, with the norms' weights in a group without decay."""
    container = llama3.build_optimizers(*arguments, **options)
    for optimizer in container:
        (group,) = optimizer.param_groups
        norms = [parameter for parameter in group["params"] if parameter.dim() < 2]
        group["params"] = [parameter for parameter in group["params"] if parameter.dim() >= 2]
        optimizer.add_param_group({"params": norms, "weight_decay": 0.0})
    return container


def config_of(task: Task) -> JobConfig:
    """The task in its words."""
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
    for key, value in (keys | task.options).items():
        section, _, name = key.rpartition(".")
        text = isinstance(value, str) and not isinstance(getattr(attrgetter(section)(config), name), str)
        setattr(attrgetter(section)(config), name, json.loads(value) if text else value)
    return config


def main() -> None:
    """Train until the clock ends it."""
    task, shape = TASK, TASK.model
    clock = Clock(task, ("torchtitan", "torchao"))

    class TimedTrainer(Trainer):
        def train_step(self, data_iterator: Any) -> None:
            self.losses: list[Tensor] = []
            super().train_step(data_iterator)
            clock.step(torch.stack(self.losses).sum())

        def forward_backward_step(self, **inputs: Any) -> Tensor:
            loss = super().forward_backward_step(**inputs)  # its share of the step's mean
            self.losses.append(loss.detach())
            return loss

    metrics.build_device_memory_monitor = NoMonitor if task.device == "cpu" else lambda: Monitor(task.device)
    if task.device == "cpu":
        # After the first step it waits for all processes by the numbers of their devices, which gloo refuses.
        torch.distributed.barrier = lambda **_: None
    config = config_of(task)
    model_args = llama3.TransformerModelArgs(
        dim=shape["dim"], n_layers=shape["num_layers"], n_heads=shape["num_heads"], n_kv_heads=shape["num_kv_heads"],
        vocab_size=shape["vocab_size"], norm_eps=shape["norm_eps"], rope_theta=shape["rope_theta"],
        # Two thirds of this, rounded up to a multiple of that, is how it words a width.
        ffn_dim_multiplier=shape["ffn_dim"] / (4 * shape["dim"]), multiple_of=shape["ffn_dim"],
        rope_scaling_args=RoPEScalingArgs(
            scaling_factor=shape["rope_scaling"], original_max_position_embeddings=shape["rope_original_seq_len"]
        ),
    )  # fmt: skip
    spec = replace(
        llama3.get_train_spec(), model_cls=Model, model_args={"task": model_args}, build_tokenizer_fn=None,
        build_dataloader_fn=lambda job_config, **_: batches(job_config.training.dataloader.pin_memory),
        build_optimizers_fn=build_optimizers, state_dict_adapter=None,
    )  # fmt: skip
    register_train_spec("task", spec)
    # What torchrun would set. Port 0 is any that is free: other subjects run beside this one.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    init_logger()
    TimedTrainer(config).train()


if __name__ == "__main__":
    main()
