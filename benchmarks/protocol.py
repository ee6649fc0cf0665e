"""The interface between `benchmarks/run.py` and its subjects: task, batches and clock. Does not import titanlike.

A subject has its own model, loss and optimizer. It is a program,

    python benchmarks/subjects/plain.py TASK.json

that builds its model from the task, loads `task.weights` as initial weights, trains on `task.batch(step)` for the steps
1, 2, 3 ..., and calls `clock.step(loss)` after each step. The clock ends the process after the last timed step.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """One row of the table. Read from the file that `benchmarks/run.py` writes."""

    subject: str
    row: str  # "shipped": the project's defaults; "best": its fastest options
    model: dict[str, Any]  # titanlike's names: name, dim, num_layers, num_heads, num_kv_heads, ffn_dim, vocab_size, ...
    device: str  # "cpu" or "cuda"
    precision: str  # "float32", "bfloat16" (mixed precision, float32 weights), or "float8" (the same, float8 matmuls)
    seq_len: int
    batch_size: int  # sequences per step
    micro_batch_size: int  # sequences per forward pass
    warmup: int  # untimed steps
    steps: int  # timed steps
    block: int  # steps per turn, timed together
    batches_file: str  # (steps, batch_size, seq_len + 1) token ids
    weights_file: str  # initial weights by titanlike's names, written by torch.save
    tokens_file: str  # all token ids, for a subject that builds the same batches itself
    result_file: str = ""
    started: float = 0.0  # start of the process, by time.time()
    lr: float = 1e-3  # constant
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 0
    options: dict[str, str] = field(default_factory=dict)  # the subject's own options

    @classmethod
    def read(cls) -> "Task":
        """Reads the task file named on the command line."""
        return cls(**json.loads(Path(sys.argv[1]).read_text()))

    @cached_property
    def _batches(self) -> Any:
        return np.load(self.batches_file, mmap_mode="r")

    @property
    def num_microbatches(self) -> int:
        return self.batch_size // self.micro_batch_size

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Returns tokens and labels (micro_batch_size, seq_len) of each micro-batch of a step, counted from 1."""
        sequences = torch.from_numpy(self._batches[step - 1].astype(np.int64))
        if self.device == "cuda":
            sequences = sequences.pin_memory().to("cuda", non_blocking=True)
        return [
            (part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in sequences.split(self.micro_batch_size)
        ]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Loads the initial weights by titanlike's names, in float32 and in the layout of torch.nn.Linear."""
        return torch.load(self.weights_file, mmap=True, weights_only=True)


class Clock:
    """Times the steps of a subject, waits for its turn between blocks of steps, and writes the result."""

    def __init__(self, task: Task, packages: tuple[str, ...] = ()) -> None:
        """Records the versions of `packages` in the result."""
        self.task = task
        self.packages = packages
        self.steps = 0
        self.losses: list[Tensor] = []
        self.result: dict[str, Any] = {"blocks": []}
        self.turn_started = 0.0

    def step(self, loss: Tensor) -> None:
        """Records a step with its mean loss before the update. Does not synchronize the host with the device."""
        task = self.task
        self.steps += 1
        self.losses.append(loss.detach())
        if self.steps == 2:
            self._synchronize()
            self.result["seconds_to_second_step"] = time.time() - task.started
            if task.steps == 0:
                self._finish()
        timed = self.steps - task.warmup
        if timed >= 0 and timed % task.block == 0:
            self._synchronize()
            if timed:
                self.result["blocks"].append(time.perf_counter() - self.turn_started)
            if timed == task.steps:
                self._finish()
            print("ready", flush=True)  # ends the turn; the next input line starts another
            if not sys.stdin.readline():
                os._exit(1)  # the parent has exited
            self.turn_started = time.perf_counter()

    def _synchronize(self) -> None:
        if self.task.device == "cuda":
            torch.cuda.synchronize()

    def _finish(self) -> NoReturn:
        if self.task.device == "cuda":
            memory = torch.cuda.max_memory_allocated() / 2**30
            name = torch.cuda.get_device_name()
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            name = "cpu"
        self.result |= {
            "peak_memory_gib": memory,
            "losses": [float(loss) for loss in self.losses],
            "versions": {name: importlib.metadata.version(name) for name in ("torch", *self.packages)},
            "threads": torch.get_num_threads(),
            "device": name,
        }
        Path(self.task.result_file).write_text(json.dumps(self.result))
        print("done", flush=True)
        os._exit(0)  # skips the subject's own shutdown
