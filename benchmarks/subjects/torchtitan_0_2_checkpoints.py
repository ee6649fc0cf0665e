"""torchtitan 0.2.2: trains a model on given batches, and saves or loads its own checkpoints. A process of
`other_checkpoints`, which runs it in torchtitan's environment by torchrun.

    torchrun ... -m benchmarks.subjects.torchtitan_0_2_checkpoints TASK.json

The task has: "folder" (of the checkpoints), "batches" (an .npy file of tokens, by step and sequence), "skip" (steps to leave out
of them), "steps", "interval" (of checkpoints), "options" (its own keys), "losses" (a file to write).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks.torchtitan_cpu import NoMonitor  # isort: skip  before torchtitan

from torchtitan.components import metrics
from torchtitan.config import JobConfig
from torchtitan.models import llama3, qwen3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

TASK: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())


class Batches:
    """The batches of one data-parallel rank. torchtitan saves the position."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.tokens = np.load(TASK["batches"])[:, rank::num_ranks].astype(np.int64)
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
        def train_step(self, data_iterator: Any) -> None:
            self.parts: list[Tensor] = []
            super().train_step(data_iterator)
            loss = torch.stack(self.parts).sum()
            if torch.distributed.get_world_size() > 1:
                torch.distributed.all_reduce(loss)
            losses[self.step] = loss.item()

        def forward_backward_step(self, **inputs: Any) -> Tensor:
            loss = super().forward_backward_step(**inputs)
            self.parts.append(loss.detach())
            return loss

    metrics.build_device_memory_monitor = NoMonitor
    config = JobConfig()
    keys: dict[str, Any] = {
        "job.dump_folder": TASK["folder"], "training.steps": TASK["steps"], "checkpoint.enable": True,
        "checkpoint.interval": TASK["interval"], "checkpoint.last_save_model_only": False, "checkpoint.keep_latest_k": 0,
        "training.mixed_precision_param": "float32", "activation_checkpoint.mode": "none", "metrics.log_freq": 1,
    }  # fmt: skip
    for key, value in (keys | TASK["options"]).items():
        section, _, name = key.rpartition(".")
        assert hasattr(attrgetter(section)(config), name), key
        setattr(attrgetter(section)(config), name, value)
    spec = {"llama3": llama3, "qwen3": qwen3}[TASK["model"]].get_train_spec()
    spec = replace(
        spec, build_tokenizer_fn=None, state_dict_adapter=None,
        build_dataloader_fn=lambda dp_rank, dp_world_size, **_: Batches(dp_rank, dp_world_size),
    )  # fmt: skip
    register_train_spec("task", spec)
    config.model.name = "task"
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
