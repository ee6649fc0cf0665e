"""What the subjects of both versions of torchtitan share. Imported before torchtitan, which a CPU needs changes of."""

import json
import os
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import Clock, Task

TASK = Task.read()
if TASK.device == "cpu":
    from benchmarks.torchtitan_cpu import NoMonitor

from torchtitan.components import metrics  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402


class Monitor(metrics.DeviceMemoryMonitor):
    """torchtitan resets the peak with each log line; the clock reads the peak of the full run."""

    def reset_peak_stats(self) -> None:
        pass


class Timed:
    """A base of a Trainer: steps of a clock, and the loss of each step."""

    clock: Clock

    def train_step(self, data_iterator: Any) -> None:
        """Runs torchtitan's step."""
        self.losses: list[Tensor] = []
        super().train_step(data_iterator)  # type: ignore[misc]
        self.clock.step(torch.stack(self.losses).sum())

    def forward_backward_step(self, **inputs: Any) -> Tensor:
        """Returns the micro-batch's share of the step's mean loss."""
        loss = super().forward_backward_step(**inputs)  # type: ignore[misc]
        self.losses.append(loss.detach().clone())  # the next replay of a graph overwrites it
        return loss


def interleave(weight: Tensor) -> Tensor:
    """Permutes query or key rows from rotate-half RoPE to torchtitan's interleaved RoPE."""
    head_dim = TASK.model["dim"] // TASK.model["num_heads"]
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def plain_name(name: str) -> str:
    """Returns the name of a parameter without the wrappers of compiled and checkpointed blocks."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def set_keys(config: Any, keys: Mapping[str, Any]) -> None:
    """Sets keys of a config, of which options of the command line are texts."""
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        is_json = isinstance(value, str) and not isinstance(getattr(attrgetter(section)(config), name), str)
        setattr(attrgetter(section)(config), name, json.loads(value) if is_json else value)


def prepare() -> Clock:
    """Prepares this process for a Trainer. Returns its clock."""
    metrics.build_device_memory_monitor = NoMonitor if TASK.device == "cpu" else lambda: Monitor(f"{TASK.device}:0")
    # The variables of torchrun. Port 0 selects a free port: other subjects run at the same time.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    init_logger()
    return Clock(TASK, ("torchtitan", "torchao"))
