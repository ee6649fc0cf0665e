"""torchtitan 0.3.0: trains a debug model on given batches, and saves or loads its own checkpoints. A process of
`other_checkpoints`, which runs it in torchtitan's environment by torchrun.

    torchrun ... -m benchmarks.subjects.torchtitan_checkpoints TASK.json

The task is that of `torchtitan_0_2_checkpoints`. So that it trains on a CPU, attention is causal scaled dot product attention,
which 0.3 has for other models, and there are no CUDA graphs.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks.torchtitan_cpu import NoMonitor  # isort: skip  before torchtitan

from torchtitan.components import metrics
from torchtitan.config import Configurable
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

TASK: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())


class NoTokenizer(Configurable):
    """The task has token ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass


class Batches(Configurable):
    """The batches of one data-parallel rank. torchtitan saves the position."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
        self.tokens = np.load(TASK["batches"])[:, dp_rank::dp_world_size].astype(np.int64)
        self.position = TASK["skip"]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for tokens in self.tokens[self.position :]:
            self.position += 1
            sequences = torch.from_numpy(tokens)
            yield {"input": sequences[:, :-1].contiguous()}, sequences[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def main() -> None:
    """Trains, and writes the losses by step."""
    losses: dict[int, float] = {}

    class RecordingTrainer(Trainer):
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

        def train_step(self, data_iterator: Any) -> None:
            self.parts: list[Tensor] = []
            super().train_step(data_iterator)
            loss = torch.stack(self.parts).sum()
            if torch.distributed.get_world_size() > 1:
                torch.distributed.all_reduce(loss)
            losses[self.step] = loss.item()

        def forward_backward_step(self, **inputs: Any) -> Tensor:
            loss = super().forward_backward_step(**inputs)
            self.parts.append(loss.detach().clone())
            return loss

    metrics.build_device_memory_monitor = NoMonitor
    registry = import_module(f"torchtitan.models.{TASK['model']}.config_registry")
    config = getattr(registry, f"{TASK['model']}_debugmodel")()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader, config.activation_checkpoint = NoTokenizer.Config(), Batches.Config(), None
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = TASK["options"].pop("optimizer.lr")
    keys: dict[str, Any] = {
        "dump_folder": TASK["folder"], "training.steps": TASK["steps"], "checkpoint.enable": True,
        "checkpoint.interval": TASK["interval"], "checkpoint.last_save_model_only": False, "checkpoint.keep_latest_k": 0,
        "training.mixed_precision_param": "float32", "training.disable_cuda_graphs": True,
    }  # fmt: skip
    for key, value in (keys | TASK["options"]).items():
        section, _, name = key.rpartition(".")
        target = attrgetter(section)(config) if section else config
        assert hasattr(target, name), key
        setattr(target, name, value)
    init_logger()
    trainer = RecordingTrainer(config)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support the factor in the reduction
    trainer.train()
    if torch.distributed.get_rank() == 0:
        Path(TASK["losses"]).write_text(json.dumps(losses))
    trainer.close()


if __name__ == "__main__":
    main()
